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
from arrow_tq.store.receiving import check_header, check_values
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, begin_checksum, header_form
from arrow_tq_schemas.commands import AdoptedChunk, RunInfo
from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.tickets import PutStream

WINDOW_BYTES = 512 << 10
"""What is read at a time, a larger chunk alone: it is hashed while it is in the cache."""
Located = tuple[ChunkId, Entry]
Verdict = dict[str, object] | None
IsHere = Callable[[ChunkId, str, str], bool]


class _Told(NamedTuple):
    """One chunk as its writer describes it; nothing of it was looked at yet."""

    number: int
    chunk_id: ChunkId
    header: ChunkHeader
    raw: bytes
    offset: int
    plan: BatchPlan

    @property
    def end(self) -> int:
        return self.offset + self.plan.length


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
        self._form = header_form(extent.key.run, info_at(0).epoch, extent.key.field)

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
        header = self._form.read(raw) or self._unusual(raw)
        what = f"chunk {header.id}"
        chunk_id = header.chunk_id
        if chunk_id.group != extent.key.group:
            self._check(what, header)
        if chunk_id.shard != self._number:
            raise MalformedMessage(f"{what}: of shard {chunk_id.shard}, this is shard {self._number}")
        plan = extent.layout.plan(header.rows, False, len(raw))
        if offset % 8 or offset + plan.length > self._file.size_bytes:
            raise self._misplaced(what, offset, plan)
        return _Told(index, chunk_id, header, raw, offset, plan)

    def _unusual(self, raw: bytes) -> ChunkHeader:
        """A header that is not in the usual form, which is usually an error."""
        header = ChunkHeader.from_bytes(raw)
        what = f"chunk {header.id}"
        self._check(what, header)
        if header.token or raw != header.to_bytes():
            raise MalformedMessage(f"{what}: its header is not in the form that is stored")
        return header

    def _check(self, what: str, header: ChunkHeader) -> None:
        key = self._extent.key
        stream = PutStream(run=key.run, field=key.field, group=key.group)
        check_header(what, stream, self._field, self._info_at(header.epoch), header)

    def _misplaced(self, what: str, offset: int, plan: BatchPlan) -> MalformedMessage:
        return MalformedMessage(
            f"{what}: {plan.length} bytes at {offset}: expected to lie between {self._extent.used_bytes} and "
            f"{self._file.size_bytes}"
        )

    def _memory(self, window: Sequence[_Told]) -> memoryview | None:
        """The window's bytes; None where some are not there: then each chunk is read by itself."""
        first = window[0].offset
        try:
            return self._read(first, window[-1].end - first)
        except Torn:
            return None

    def _read(self, offset: int, size: int) -> memoryview:
        return memoryview(self._file.read_into(self._scratch(size), offset))

    def _believe(self, told: _Told, memory: memoryview | None, first: int) -> Located | None:
        """The entry of a chunk that is whole and right; None where it is stored already."""
        extent, header, plan, offset = self._extent, told.header, told.plan, told.offset
        what = f"chunk {header.id}"
        if offset < extent.used_bytes:
            # Asked again after an answer that was lost; what is new lies behind what was adopted.
            if self._is_here(told.chunk_id, header.run, header.checksum):
                return None
            raise self._misplaced(what, offset, plan)
        if memory is None:
            try:
                memory, first = self._read(offset, plan.length), offset
            except Torn as error:
                raise MalformedMessage(f"{what}: {error}") from None
        message = memory[offset - first : told.end - first]
        if bytes(message[: plan.values_at]) != extent.layout.head(plan, 0, told.raw):
            raise MalformedMessage(f"{what}: the message at {offset} is not the one of its header")
        values = message[plan.values_at : plan.values_at + plan.values_bytes]
        digest = begin_checksum(
            told.chunk_id, header.run, header.epoch, header.field, header.start, header.rows
        )
        digest.update(values)
        if digest.hexdigest() != header.checksum:
            raise MalformedMessage(f"{what}: its values do not have the checksum {header.checksum}")
        shaped = np.frombuffer(values, extent.layout.dtype).reshape(header.rows, *extent.layout.item_shape)
        check_values(self._field, Chunk(header, shaped, None))
        if self._is_here(told.chunk_id, header.run, header.checksum):
            return None
        return told.chunk_id, Entry(
            *(extent, offset, plan.length, header.rows, False, header.start, header.epoch, header.checksum),
            verified=True,
        )
