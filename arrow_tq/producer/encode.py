"""Encoding: a caller's array becomes chunks, in as few passes over it as there can be."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from xxhash import xxh3_128

from arrow_tq.backend import Header, Place, Placer
from arrow_tq.producer.arrays import Mask, Source
from arrow_tq.producer.convert import Conversion
from arrow_tq.producer.filling import fill
from arrow_tq.producer.pieces import Pieces, as_rows
from arrow_tq.producer.private import Values, convert, selections
from arrow_tq_schemas.chunks import (
    Chunk,
    begin_checksum,
    checksum,
    header_bytes,
    header_json,
    header_parts,
    trusted_header,
)
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import Receipt, StoredChunk, stored_chunk, trusted_receipt

CHUNK_BYTES = 8 << 20
"""Payload of one chunk of one layer group, about: large enough that a chunk's cost is its bytes."""
ROWS_MAX = (1 << 31) - 1
POSITION_MAX = 1 << 48


class IdSource(Protocol):
    """Where new chunk ids come from: a writer's ``IdFactory``, or the series of one stream."""

    def next(self, shard: int) -> ChunkId:
        """An id never used before."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Chunks ready to be stored, and the receipt that a step attaches once they are."""

    chunks_by_group: list[list[Chunk]]
    """One list a layer group; the same rows in each."""
    receipt: Receipt
    copied: bool
    """False: chunks still reference the caller's memory."""
    places: list[Place] = field(default_factory=list)
    """What is stored already, where it was written; the receipt has it, the lists of chunks do not."""

    @property
    def nbytes(self) -> int:
        """Payload bytes of all chunks."""
        return sum(chunk.bytes for chunk in self.receipt.chunks)

    def copy(self) -> Encoded:
        """The same chunks over memory of their own."""
        chunks = [
            [Chunk(one.header, one.values.copy(), one.valid) for one in group]
            for group in self.chunks_by_group
        ]
        return Encoded(chunks, self.receipt, True, self.places)


class Encoder:
    """Turns arrays into chunks of one field for one writer. Thread-safe.

    Args:
        field: the declared field.
        run: the run's name.
        epoch: the epoch in which the writer joined.
        chunk_bytes: payload of a chunk in the largest layer group, at most (one row at least).
    """

    def __init__(self, field: Field, run: str, epoch: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.field = field
        self.run = run
        self.epoch = epoch
        self.chunk_bytes = chunk_bytes
        self._rows_per_chunk = rows_per_chunk(field, chunk_bytes)
        self._groups = len(field.groups)
        self._row_bytes = field.row_bytes
        self._selections = selections(field)
        self._header = header_parts(run, epoch, field.name)
        self._conversions: dict[str, Conversion] = {}

    def encode(
        self, array: object, start: int, shard: int, ids: IdSource, placer: Placer | None = None
    ) -> Encoded:
        """As ``encode``; with a placer, rows are written where they will stay wherever it has room for them.

        Raises:
            InvalidField, ValueOutOfRange, InvalidInput: as ``encode``; nothing of the array is stored.
            StoreFull: the placer has no room; nothing of the array is stored.
        """
        start = _position(self.field, start)
        source = as_rows(self.field, array, start)
        rows = len(source)
        if start + rows > POSITION_MAX:
            raise InvalidInput(
                f"field {self.field.name!r}: positions end at {start + rows}, at most {POSITION_MAX}"
            )
        conversion = self._conversions.get(source.dtype)
        if conversion is None:
            conversion = self._conversions[source.dtype] = Conversion.plan(self.field, source.dtype)
        put = _Put(self, conversion, source, start, shard, ids)
        try:
            for piece in _pieces(rows, self._rows_per_chunk):
                if placer is None or not put.place(placer, piece):
                    put.convert(piece)
        except BaseException:
            put.withdraw()
            raise
        return put.encoded(rows)


class _Put:
    """One array on its way."""

    def __init__(
        self,
        encoder: Encoder,
        conversion: Conversion,
        source: Source | Pieces,
        start: int,
        shard: int,
        ids: IdSource,
    ) -> None:
        self._encoder = encoder
        self._conversion = conversion
        self._source = source
        self._start = start
        self._shard = shard
        self._ids = ids
        self._chunks: list[list[Chunk]] = [[] for _ in range(encoder._groups)]
        self._stored: list[StoredChunk] = []
        self._places: list[Place] = []
        self._copied = True

    def place(self, placer: Placer, piece: tuple[int, int]) -> bool:
        """Write rows ``[first, end)`` into the store's memory; False where they have to be converted."""
        encoder, source = self._encoder, self._source
        first, end = piece
        if source.has_nulls(first, end):
            return False
        rows, start = end - first, self._start + first
        name, run, epoch = encoder.field.name, encoder.run, encoder.epoch
        place = placer.reserve(
            encoder.field, run, rows, header_bytes(encoder._header, start, rows), self._shard
        )
        if place is None:
            return False
        try:
            family = self._ids.next(self._shard)
            ids = [family] if encoder._groups == 1 else list(map(family.sibling, range(encoder._groups)))
            digests = [begin_checksum(one, run, epoch, name, start, rows) for one in ids]
            if not self._fill(piece, place.values, digests):
                return False
            headers = [
                self._heading(one, start, rows, digest) for one, digest in zip(ids, digests, strict=True)
            ]
            self._places.append(place)
            place.publish(headers)
        finally:
            place.abandon()
        self._stored.append(
            stored_chunk(headers[0].chunk_id.hex, start, rows, rows * encoder._row_bytes, len(ids))
        )
        return True

    def _fill(self, piece: tuple[int, int], targets: Sequence[Values], digests: Sequence[xxh3_128]) -> bool:
        """False where rows turned out to be null: what was written then means nothing."""
        source, selections, row = self._source, self._encoder._selections, piece[0]
        rows = piece[1] - row
        for block in source.blocks(*piece):
            # Most puts are one array, and fill their chunk at once.
            rest = targets if len(block) == rows else [one[row - piece[0] :][: len(block)] for one in targets]
            if not fill(
                *(self._conversion, block, source.dtype, self._start + row), *(rest, selections, digests)
            ):
                return False
            row += len(block)
        return True

    def convert(self, piece: tuple[int, int]) -> None:
        """Make chunks of rows ``[first, end)``, in memory of their own where they have to be changed."""
        start = self._start + piece[0]
        part = self._source.part(*piece)
        values, valid, private = convert(self._conversion, part, self._encoder._selections, start)
        family = self._ids.next(self._shard)
        chunks = [self._chunk(family.sibling(group), one, valid, start) for group, one in enumerate(values)]
        for of_group, chunk in zip(self._chunks, chunks, strict=True):
            of_group.append(chunk)
        self._stored.append(_stored(self._encoder.field, chunks, valid))
        self._copied = self._copied and private

    def withdraw(self) -> None:
        """Another part of the array does not fit: what is stored goes."""
        for place in reversed(self._places):
            place.withdraw()

    def encoded(self, rows: int) -> Encoded:
        encoder = self._encoder
        receipt = trusted_receipt(
            encoder.run, encoder.epoch, encoder.field.name, self._start, rows, self._stored
        )
        return Encoded(self._chunks, receipt, self._copied, self._places)

    def _heading(self, chunk_id: ChunkId, start: int, rows: int, digest: xxh3_128) -> Header:
        encoder, checksum = self._encoder, digest.hexdigest()
        raw = header_json(encoder._header, chunk_id.hex, start, rows, checksum)
        return Header(chunk_id, encoder.epoch, start, checksum, raw)

    def _chunk(self, chunk_id: ChunkId, values: Values, valid: Mask | None, start: int) -> Chunk:
        run, epoch, name = self._encoder.run, self._encoder.epoch, self._encoder.field.name
        seen = checksum(chunk_id, run, epoch, name, start, values, valid)
        header = trusted_header(chunk_id.hex, run, epoch, name, start, len(values), seen)
        return Chunk(header, values, valid)


def encode(
    field: Field,
    array: object,
    start: int,
    *,
    run: str,
    epoch: int,
    shard: int,
    ids: IdSource,
    chunk_bytes: int = CHUNK_BYTES,
) -> Encoded:
    """Chunks of ``field`` for positions ``[start, start + rows)``.

    Integers are checked against the field's range and against ``num_experts``; a whole row of -1 in a
    signed array of expert ids is a null row. Floats may change width where no finite value becomes
    infinite, and round to nearest even into bfloat16; they never become integers. An array that is in the
    storage dtype already, aligned and C-contiguous, is referenced and not copied.

    Args:
        field: the declared field.
        array: ``[rows, *field.shape]``: numpy of any layout, nested lists, pyarrow (nulls are null rows)
            or a torch tensor; uint16 bits or ml_dtypes for bfloat16. A single number is one row. A list of
            numpy arrays or tensors of that shape is what they are one behind the other.
        start: absolute position of row 0.
        run: the run's name.
        epoch: the epoch in which the writer joined.
        shard: shard number for the chunks' ids.
        ids: the writer's source of ids.
        chunk_bytes: payload of a chunk in the largest layer group, at most (one row at least).

    Raises:
        InvalidField: shape or dtype does not fit; names what was expected and got.
        ValueOutOfRange: a value does not fit; names field, value, position and index inside the item.
        InvalidInput: ``start`` is no position.
    """
    return Encoder(field, run, epoch, chunk_bytes).encode(array, start, shard, ids)


def _position(field: Field, start: int) -> int:
    try:
        position = operator.index(start)
    except TypeError:
        position = -1
    if not 0 <= position < POSITION_MAX:
        raise InvalidInput(f"field {field.name!r}: start {start!r}: expected a position from 0 up")
    return position


def rows_per_chunk(field: Field, chunk_bytes: int) -> int:
    """Rows of a chunk whose largest layer group has ``chunk_bytes`` at most; one at least."""
    largest = max(len(layers) for layers in field.groups)
    layers = 1 if field.layer_axis is None else field.shape[field.layer_axis]
    row_bytes = field.row_bytes // layers * max(largest, 1)
    return min(max(1, chunk_bytes // row_bytes), ROWS_MAX)


def _pieces(rows: int, at_most: int) -> list[tuple[int, int]]:
    """``rows`` split into equal pieces, so that none is left small."""
    if 0 < rows <= at_most:
        return [(0, rows)]
    count = -(-rows // at_most)
    edges = [rows * piece // count for piece in range(count + 1)] if count else [0]
    return list(itertools.pairwise(edges))


def _stored(field: Field, chunks: Sequence[Chunk], valid: Mask | None) -> StoredChunk:
    header = chunks[0].header
    if valid is None or field.pad is not None:
        # A null row is a hole, unless the field says what padding reads as.
        nbytes = sum(chunk.nbytes for chunk in chunks)
        return stored_chunk(header.id, header.start, header.rows, nbytes, len(chunks))
    return StoredChunk(
        id=header.id,
        start=header.start,
        rows=header.rows,
        bytes=sum(chunk.nbytes for chunk in chunks),
        groups=len(chunks),
        valid=_runs(valid),
    )


def _runs(valid: Mask) -> list[tuple[int, int]]:
    """Half-open runs of True."""
    edges = np.flatnonzero(np.diff(valid, prepend=False, append=False)).reshape(-1, 2)
    return [(first, end) for first, end in edges.tolist()]
