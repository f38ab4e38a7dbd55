"""Encoding: a caller's array becomes chunks, in as few passes over it as there can be."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from arrow_tq.producer.arrays import Source, as_source
from arrow_tq.producer.convert import Conversion
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, checksum
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import Receipt, StoredChunk

CHUNK_BYTES = 8 << 20
"""Payload of one chunk of one layer group, about: large enough that a chunk's cost is its bytes."""
BLOCK_BYTES = 512 << 10
"""What is checked and cast at a time: small enough to stay in the processor's cache."""
ROWS_MAX = (1 << 31) - 1
POSITION_MAX = 1 << 48

_Values = npt.NDArray[np.generic]
_Mask = npt.NDArray[np.bool_]


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

    @property
    def nbytes(self) -> int:
        """Payload bytes of all chunks."""
        return sum(chunk.bytes for chunk in self.receipt.chunks)

    def copy(self) -> Encoded:
        """The same chunks over memory of their own."""
        chunks = [[replace(one, values=one.values.copy()) for one in group] for group in self.chunks_by_group]
        return Encoded(chunks, self.receipt, True)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Who writes what: everything that the chunks of one put share."""

    field: Field
    run: str
    epoch: int
    shard: int
    ids: IdSource


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
            or a torch tensor; uint16 bits or ml_dtypes for bfloat16. A single number is one row.
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
    start = _position(field, start)
    source = as_source(field, array, start)
    rows = len(source.values)
    if start + rows > POSITION_MAX:
        raise InvalidInput(f"field {field.name!r}: positions end at {start + rows}, at most {POSITION_MAX}")
    conversion = Conversion.plan(field, source.dtype)
    writer = _Writer(field, run, epoch, shard, ids)
    chunks_by_group: list[list[Chunk]] = [[] for _ in field.groups]
    stored: list[StoredChunk] = []
    copied = True
    for first, end in _pieces(rows, rows_per_chunk(field, chunk_bytes)):
        values, valid, private = _convert(conversion, source, first, end, start)
        chunks = _chunks(writer, values, valid, start + first)
        for of_group, chunk in zip(chunks_by_group, chunks, strict=True):
            of_group.append(chunk)
        stored.append(_stored(field, chunks, valid))
        copied = copied and private
    receipt = Receipt(run=run, epoch=epoch, field=field.name, start=start, rows=rows, chunks=stored)
    return Encoded(chunks_by_group, receipt, copied)


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
    count = -(-rows // at_most)
    edges = [rows * piece // count for piece in range(count + 1)] if count else [0]
    return list(itertools.pairwise(edges))


def _convert(
    conversion: Conversion, source: Source, first: int, end: int, start: int
) -> tuple[list[_Values], _Mask | None, bool]:
    """Rows ``[first, end)`` by layer group, which of them are valid, and whether they are a copy."""
    field, storage = conversion.field, conversion.field.type.numpy
    given = source.values[first:end]
    missing = None if source.valid is None else ~source.valid[first:end]
    nulls: _Mask = np.zeros(end - first, dtype=np.bool_) if missing is None else missing
    in_place = (
        len(field.groups) == 1
        and source.dtype in (field.dtype, storage.name)
        and not conversion.narrows_float
        and given.dtype.isnative
        and given.flags.c_contiguous
        and given.flags.aligned
        and not nulls.any()
    )
    if in_place and conversion.bounds is None:
        return [given.view(storage)], None, source.private
    shapes = [field.group_shape(group) for group in range(len(field.groups))]
    out = [] if in_place else [np.empty((end - first, *shape), storage) for shape in shapes]
    selections = _selections(field)
    step = max(1, BLOCK_BYTES // max(given.itemsize * field.row_bytes // storage.itemsize, 1))
    for row in range(0, end - first, step):
        block, blanks = given[row : row + step], nulls[row : row + step]
        if blanks.any():
            block = block.copy()
            block[blanks] = 0
        block, found = conversion.apply(block, source.dtype, start + first + row)
        if found is not None:
            blanks |= found
        for target, selection in zip(out, selections, strict=False):
            np.copyto(target[row : row + step], block[selection], casting="unsafe")
    if in_place:
        out = [given.view(storage)]
    if not nulls.any():
        return out, None, source.private or not in_place
    if in_place:
        out = [values.copy() for values in out]
    for values in out:
        values[nulls] = 0
    return out, ~nulls, True


def _selections(field: Field) -> list[tuple[slice, ...]]:
    """Index of each layer group inside ``[rows, *field.shape]``."""
    if field.layer_axis is None:
        return [(slice(None),)]
    selections, first = [], 0
    for layers in field.groups:
        before = (slice(None),) * (1 + field.layer_axis)
        selections.append((*before, slice(first, first + len(layers))))
        first += len(layers)
    return selections


def _chunks(writer: _Writer, by_group: Sequence[_Values], valid: _Mask | None, start: int) -> list[Chunk]:
    """Sibling chunks of the same rows, one a layer group."""
    family = writer.ids.next(writer.shard)
    return [
        _chunk(writer, family.sibling(group), values, valid, start) for group, values in enumerate(by_group)
    ]


def _chunk(writer: _Writer, chunk_id: ChunkId, values: _Values, valid: _Mask | None, start: int) -> Chunk:
    name = writer.field.name
    header = ChunkHeader(
        id=chunk_id.hex,
        run=writer.run,
        epoch=writer.epoch,
        field=name,
        start=start,
        rows=len(values),
        checksum=checksum(chunk_id, writer.run, writer.epoch, name, start, values, valid),
    )
    return Chunk(header, values, valid)


def _stored(field: Field, chunks: Sequence[Chunk], valid: _Mask | None) -> StoredChunk:
    header = chunks[0].header
    return StoredChunk(
        id=header.id,
        start=header.start,
        rows=header.rows,
        bytes=sum(chunk.nbytes for chunk in chunks),
        groups=len(chunks),
        # A null row is a hole, unless the field says what padding reads as.
        valid=None if valid is None or field.pad is not None else _runs(valid),
    )


def _runs(valid: _Mask) -> list[tuple[int, int]]:
    """Half-open runs of True."""
    edges = np.flatnonzero(np.diff(valid, prepend=False, append=False)).reshape(-1, 2)
    return [(first, end) for first, end in edges.tolist()]
