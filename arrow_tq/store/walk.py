"""Finds the chunks of an extent that has no sidecar: after a crash, or when the sidecar is damaged.

A cut anywhere past a message's header still parses, with a partly zero body, so every chunk is verified
by its checksum. A zeroed page would end a naive walk early, so past damage the walk goes on at the next
8-byte boundary that looks like a message and turns out to be one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from arrow_tq.store.extent import Entry, Extent
from arrow_tq_schemas.chunks import METADATA_KEY, Chunk, ChunkHeader, from_array, verify
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.ids import ChunkId

CONTINUATION = 0xFFFFFFFF
METADATA_BYTES_MAX = 1 << 16
SCAN_WINDOW_BYTES = 1 << 20
_UNREADABLE = (pa.ArrowException, OSError, ValueError, EOFError, StopIteration, NotImplementedError, KeyError)
"""What pyarrow was seen to raise on messages with flipped bits."""


def walk(extent: Extent) -> list[tuple[ChunkId, Entry]]:
    """Every chunk whose bytes are whole, verified; sets ``used_bytes`` to the end of the last one."""
    walker = _Walker(extent)
    found = list(walker.chunks())
    extent.used_bytes = max((entry.offset + entry.length for _, entry in found), default=0)
    return found


class _Walker:
    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._buffer = pa.py_buffer(extent.file.map)
        self._end = extent.file.data_end() // 8 * 8
        self._words = np.frombuffer(extent.file.map, "<u4", self._end // 4)
        self._prefix = extent.schema.serialize().to_pybytes()

    def chunks(self) -> Iterator[tuple[ChunkId, Entry]]:
        place = self._next_message(0)
        while place is not None:
            length, located = self._message(place)
            if located is not None:
                yield located
            # A message that parses but does not verify may hide others only in its own bytes.
            place = self._next_message(place + (length if located is not None else 8))

    def _next_message(self, place: int) -> int | None:
        """The next 8-byte boundary at or after ``place`` that may begin one of our messages."""
        if place < self._end and len(self._candidates(place, place + 8)) and self._is_ours(place):
            return place
        while place < self._end:
            end = min(place + SCAN_WINDOW_BYTES, self._end)
            # Padding of -1 looks like many messages: all places of a window are found in one pass.
            for candidate in self._candidates(place, end):
                if self._is_ours(candidate):
                    return candidate
            place = end
        return None

    def _candidates(self, place: int, end: int) -> list[int]:
        pairs = self._words[place // 4 : min(end, self._end) // 4].reshape(-1, 2)
        sizes = pairs[:, 1]
        like = (pairs[:, 0] == CONTINUATION) & (sizes > 0) & (sizes < METADATA_BYTES_MAX) & (sizes % 8 == 0)
        found: list[int] = (place + 8 * np.flatnonzero(like)).tolist()
        return found

    def _is_ours(self, place: int) -> bool:
        """Whether the message's metadata names a chunk: far cheaper than parsing it."""
        size = int(self._words[place // 4 + 1])
        return METADATA_KEY in self._buffer.slice(place + 8, min(size, self._end - place - 8)).to_pybytes()

    def _message(self, place: int) -> tuple[int, tuple[ChunkId, Entry] | None]:
        """Length of the message at ``place`` (0: none), and its chunk if it is whole and ours."""
        try:
            rest = self._buffer.slice(place, self._end - place)
            message = pa.ipc.read_message(pa.BufferReader(rest))
            body = 0 if message.body is None else message.body.size
            length = 8 + int(self._words[place // 4 + 1]) + body
            if message.type != "record batch":
                return length, None
            whole = self._prefix + self._buffer.slice(place, length).to_pybytes()
            reader = pa.ipc.open_stream(pa.BufferReader(whole))
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            batch.validate(full=True)
        except _UNREADABLE:
            return 0, None
        raw = None if metadata is None else metadata.get(METADATA_KEY)
        return length, None if raw is None else self._verified(place, length, batch, raw)

    def _verified(
        self, place: int, length: int, batch: pa.RecordBatch, raw: bytes
    ) -> tuple[ChunkId, Entry] | None:
        key = self._extent.key
        try:
            header = ChunkHeader.from_bytes(raw)
            chunk_id = header.chunk_id
        except ArrowTQError:
            return None
        if (header.run, header.field, chunk_id.group) != (key.run, key.field, key.group):
            return None
        values, valid = from_array(batch.column(0), self._extent.item_shape)
        if batch.num_rows != header.rows or not verify(Chunk(header, values, valid)):
            return None
        entry = Entry(
            self._extent, place, length, header.rows, valid is not None, header.start, header.epoch,
            header.checksum, verified=False,
        )  # fmt: skip
        entry.verified = verify(self._extent.chunk(chunk_id, entry))
        return (chunk_id, entry) if entry.verified else None
