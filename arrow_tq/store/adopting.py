"""Looks at what a client wrote into a granted file before any of it is believed, many chunks at a time.

Chunks that lie one behind the other are read in one ``pread``, into memory that stays in the processor's
cache, and each is checked there: the message that belongs to its header, its checksum, its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from arrow_tq.layout.columns import BatchPlan
from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.granted_file import GrantedFile, Torn
from arrow_tq.store.receiving import check_header, check_values, is_bounded
from arrow_tq_schemas.chunks import ChunkHeader, begin_checksum, header_form
from arrow_tq_schemas.commands import AdoptedChunk, RunInfo
from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.tickets import PutStream

WINDOW_BYTES = 512 << 10
"""What is read at a time: it is hashed while it is in the cache. A larger chunk alone, and at once where its
values have bounds to be looked at."""
Located = tuple[ChunkId, Entry]
Verdict = dict[str, object] | None
IsHere = Callable[[ChunkId, str, str], bool]


class _Told(NamedTuple):
    """One chunk as its writer describes it; nothing of it was looked at yet."""

    number: int
    chunk_id: ChunkId
    epoch: int
    start: int
    checksum: str
    raw: bytes
    """Its header."""
    plan: BatchPlan
    offset: int
    end: int


class Adoption:
    """The check of one call's chunks, all of one granted file whose lock is held.

    Args:
        scratch: gives memory of so many bytes, the same each time.
        info_at: the run's declaration, as new as a chunk's epoch.
        number: of the shard that this is.
        is_here: whether the same chunk is stored already; raises where another one has its id.
    """

    def __init__(
        self,
        extent: Extent,
        file: GrantedFile,
        scratch: Callable[[int], npt.NDArray[np.uint8]],
        field: Field,
        info_at: Callable[[int], RunInfo],
        number: int,
        is_here: IsHere,
    ) -> None:
        self._extent = extent
        self._file = file
        self._scratch = scratch
        self._field = field
        self._info_at = info_at
        self._number = number
        self._is_here = is_here
        self._epoch = info_at(0).epoch
        self._form = header_form(extent.key.run, self._epoch, extent.key.field)
        self._bounded = is_bounded(field, extent.layout.dtype)

    def check(self, chunks: Sequence[AdoptedChunk]) -> tuple[list[Verdict], list[Located]]:
        """A verdict on each, None for what is or will be stored; and entries of those that are new."""
        verdicts: list[Verdict] = [None] * len(chunks)
        good: list[Located] = []
        for window in self._windows(chunks, verdicts):
            memory = self._memory(window)
            for told in window:
                try:
                    found = self._believe(told, memory, window[0].offset)
                except ArrowTQError as error:
                    verdicts[told.number] = error.to_wire()
                    continue
                if found is not None:
                    good.append(found)
                    self._extent.used_bytes = told.end
        return verdicts, good

    def _windows(self, chunks: Sequence[AdoptedChunk], verdicts: list[Verdict]) -> Iterator[list[_Told]]:
        """Chunks that are read at once; those that can be refused by what is said of them are not in it."""
        window: list[_Told] = []
        for index, chunk in enumerate(chunks):
            try:
                told = self._told(index, chunk)
            except ArrowTQError as error:
                verdicts[index] = error.to_wire()
                continue
            if window and (told.offset != window[-1].end or told.end - window[0].offset > WINDOW_BYTES):
                yield window
                window = []
            window.append(told)
        if window:
            yield window

    def _told(self, index: int, chunk: AdoptedChunk) -> _Told:
        extent, raw, offset = self._extent, chunk.header.encode(), chunk.offset
        parts, epoch = self._form.parts(raw), self._epoch
        if parts is None:
            header = self._unusual(raw)
            parts, epoch = (header.id, header.start, header.rows, header.checksum), header.epoch
        name, start, rows, checksum = parts
        chunk_id = ChunkId.from_hex(name)
        if chunk_id.group != extent.key.group:
            self._check(ChunkHeader.from_bytes(raw))
        if chunk_id.shard != self._number:
            raise MalformedMessage(f"chunk {name}: of shard {chunk_id.shard}, this is shard {self._number}")
        plan = extent.layout.plan(rows, False, len(raw))
        end = offset + plan.length
        if offset % 8 or end > self._file.size_bytes:
            raise self._misplaced(chunk_id, offset, plan)
        return _Told(index, chunk_id, epoch, start, checksum, raw, plan, offset, end)

    def _unusual(self, raw: bytes) -> ChunkHeader:
        """A header that is not in the usual form, which is usually an error."""
        header = ChunkHeader.from_bytes(raw)
        self._check(header)
        if header.token or raw != header.to_bytes():
            raise MalformedMessage(f"chunk {header.id}: its header is not in the form that is stored")
        return header

    def _check(self, header: ChunkHeader) -> None:
        key = self._extent.key
        stream = PutStream(run=key.run, field=key.field, group=key.group)
        check_header(f"chunk {header.id}", stream, self._field, self._info_at(header.epoch), header)

    def _misplaced(self, chunk_id: ChunkId, offset: int, plan: BatchPlan) -> MalformedMessage:
        return MalformedMessage(
            f"chunk {chunk_id.hex}: {plan.length} bytes at {offset}: expected to lie between "
            f"{self._extent.used_bytes} and {self._file.size_bytes}"
        )

    def _parts(self, told: _Told, memory: memoryview | None, first: int) -> Iterator[memoryview]:
        """What is before a chunk's values, and these: in one, or in pieces where they need not be looked at.

        A piece is there until the next one. Raises ``Torn``.
        """
        plan, offset = told.plan, told.offset
        values_end = plan.values_at + plan.values_bytes
        if memory is None and not self._in_pieces(plan):
            memory, first = self._read(offset, plan.length), offset
        if memory is not None:
            message = memory[offset - first : told.end - first]
            yield message[: plan.values_at]
            yield message[plan.values_at : values_end]
            return
        yield self._read(offset, plan.values_at)
        for low in range(plan.values_at, values_end, WINDOW_BYTES):
            yield self._read(offset + low, min(WINDOW_BYTES, values_end - low))

    def _in_pieces(self, plan: BatchPlan) -> bool:
        return plan.length > WINDOW_BYTES and not self._bounded

    def _memory(self, window: Sequence[_Told]) -> memoryview | None:
        """The bytes of a window; None where they are not all there, or a chunk is read by itself."""
        first = window[0].offset
        if self._in_pieces(window[0].plan):
            return None
        try:
            return self._read(first, window[-1].end - first)
        except Torn:
            return None

    def _read(self, offset: int, size: int) -> memoryview:
        return memoryview(self._file.read_into(self._scratch(size), offset))

    def _believe(self, told: _Told, memory: memoryview | None, first: int) -> Located | None:
        """The entry of a chunk that is whole and right; None where it is stored already."""
        extent, plan, offset, chunk_id = self._extent, told.plan, told.offset, told.chunk_id
        run, field = extent.key.run, extent.key.field
        if offset < extent.used_bytes:
            # Asked again after an answer that was lost; what is new lies behind what was adopted.
            if self._is_here(chunk_id, run, told.checksum):
                return None
            raise self._misplaced(chunk_id, offset, plan)
        parts = self._parts(told, memory, first)
        digest = begin_checksum(chunk_id, run, told.epoch, field, told.start, plan.rows)
        values = memoryview(b"")
        try:
            if bytes(next(parts)) != extent.layout.head(plan, 0, told.raw):
                raise MalformedMessage(
                    f"chunk {chunk_id.hex}: the message at {offset} is not the one of its header"
                )
            for values in parts:
                digest.update(values)
        except Torn as error:
            raise MalformedMessage(f"chunk {chunk_id.hex}: {error}") from None
        if digest.hexdigest() != told.checksum:
            raise MalformedMessage(
                f"chunk {chunk_id.hex}: its values do not have the checksum {told.checksum}"
            )
        if self._bounded:
            shaped = np.frombuffer(values, extent.layout.dtype).reshape(plan.rows, *extent.layout.item_shape)
            check_values(self._field, shaped, told.start)
        if self._is_here(chunk_id, run, told.checksum):
            return None
        return chunk_id, Entry(
            *(extent, offset, plan.length, plan.rows, False, told.start, told.epoch, told.checksum), True
        )
