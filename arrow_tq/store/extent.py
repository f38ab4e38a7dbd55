"""An extent: one Arrow IPC stream in a mapped file, a record batch a chunk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field as slot
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.layout.appender import Appender, Reserved
from arrow_tq.layout.columns import Buffer, ColumnLayout, Values
from arrow_tq.layout.messages import pad
from arrow_tq.store.extent_key import ExtentKey
from arrow_tq.store.mapped_file import MappedFile
from arrow_tq.store.space import Space
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, trusted_header
from arrow_tq_schemas.errors import InternalError
from arrow_tq_schemas.ids import ChunkId

MESSAGE_SLACK_BYTES = 4096
"""More than a batch's message takes beside its body, and than the end-of-stream marker."""


@dataclass(slots=True, eq=False)
class Entry:
    """Where a chunk is, and what is known of it. About 200 bytes a chunk."""

    extent: Extent
    offset: int
    """Of its message in the file."""
    length: int
    """Of its message, body included."""
    rows: int
    nullable: bool
    """Whether validity bits precede the values."""
    start: int
    epoch: int
    checksum: str
    verified: bool
    """Written by this process, or its checksum was compared."""
    pinned: bool = False
    """Attached to a step: not an orphan."""
    corrupt: bool = False


@dataclass(slots=True, eq=False)
class Extent:
    """An extent, live (appended to by one thread at a time) or sealed.

    Attributes:
        used_bytes: end of the last complete message.
        chunks: how many of its chunks are not dropped.
        appended_at: monotonic time of the last append.
    """

    key: ExtentKey
    number: int
    file: MappedFile
    schema: pa.Schema
    layout: ColumnLayout
    used_bytes: int = 0
    chunks: int = 0
    sealed: bool = False
    retired: bool = False
    """Without chunks, and soon without its file."""
    appended_at: float = slot(default_factory=time.monotonic)
    memory: Callable[[int, int], Buffer] = slot(init=False)
    """Of this extent's own mapping: its file may become another extent's, with another mapping."""
    token: str = slot(default_factory=lambda: secrets.token_hex(8))
    """Tells its content from whatever else lies in the same file, or at the same path, later."""
    written: list[ChunkId] = slot(default_factory=list)
    """Ids in the order of their appends, while it is live."""
    _appender: Appender | None = None

    @classmethod
    def create(
        cls,
        key: ExtentKey,
        number: int,
        path: Path,
        schema: pa.Schema,
        size_bytes: int,
        space: Space,
        layout: ColumnLayout | None = None,
    ) -> Extent:
        """A new live extent, still without blocks."""
        return cls.over(key, number, MappedFile.create(path, size_bytes, space), schema, layout)

    @classmethod
    def over(
        cls,
        key: ExtentKey,
        number: int,
        file: MappedFile,
        schema: pa.Schema,
        layout: ColumnLayout | None = None,
    ) -> Extent:
        """A new live extent in a file that has blocks already."""
        return cls(key, number, file, schema, layout or ColumnLayout(schema))

    @classmethod
    def reopen(cls, key: ExtentKey, number: int, file: MappedFile, schema: pa.Schema) -> Extent:
        """A sealed extent of an earlier process."""
        extent = cls.over(key, number, file, schema)
        extent.sealed = True
        return extent

    def __post_init__(self) -> None:
        self.memory = self.file.memory()

    @property
    def rest_bytes(self) -> int:
        return self.file.size_bytes - self.used_bytes

    @property
    def item_shape(self) -> tuple[int, ...]:
        return self.layout.item_shape

    def reserve(self, rows: int, metadata_bytes: int, nullable: bool = False) -> Reserved:
        """Room for a chunk behind the last one; its blocks must be allocated. Nothing is shown of it yet."""
        if self._appender is None:
            self._appender = Appender(np.frombuffer(self.file.map, np.uint8), self.layout)
            self._appender.begin(self.schema.serialize().to_pybytes())
            self.used_bytes = self._appender.used_bytes
        reserved = self._appender.reserve(rows, metadata_bytes, nullable)
        if reserved.end > self.file.allocated_bytes:
            raise InternalError(f"{self.file.path}: a message larger than was allocated for it")
        return reserved

    def complete(
        self,
        chunk_id: ChunkId,
        reserved: Reserved,
        header: bytes,
        epoch: int,
        start: int,
        checksum: str,
        valid: npt.NDArray[np.bool_] | None = None,
    ) -> Entry:
        """End what was reserved: its values are written. The entry is for the index."""
        assert self._appender is not None
        self._appender.complete(reserved, header, valid)
        self.used_bytes = reserved.end
        self.appended_at = time.monotonic()
        self.written.append(chunk_id)
        plan = reserved.plan
        return Entry(
            self, reserved.offset, plan.length, plan.rows, plan.valid_bytes > 0, start, epoch, checksum, True
        )

    def append(self, chunk: Chunk) -> Entry:
        """Write the chunk's batch; its blocks must be allocated. The entry is for the index."""
        header = chunk.header
        # Like Arrow: no validity bits where nothing is null.
        valid = None if chunk.valid is None or chunk.valid.all() else chunk.valid
        stored = header.model_copy(update={"token": ""}) if header.token else header
        raw = stored.to_bytes()
        reserved = self.reserve(header.rows, len(raw), valid is not None)
        np.copyto(reserved.values, chunk.values)
        return self.complete(
            *(header.chunk_id, reserved, raw, header.epoch, header.start, header.checksum), valid
        )

    def take_back(self, entry: Entry) -> bool:
        """Use the room of a dropped chunk again; only where nothing was appended behind it."""
        if self._appender is None or entry.offset + entry.length != self.used_bytes:
            return False
        self._appender.rewind(entry.offset)
        self.used_bytes = entry.offset
        self.written.pop()
        return True

    def chunk(self, chunk_id: ChunkId, entry: Entry) -> Chunk:
        """The chunk at ``entry``: read-only views of the mapping. Raises ``ValueError`` once unmapped."""
        end = entry.offset + entry.length
        values, valid = self.layout.read(self.memory, end, entry.rows, entry.nullable)
        return Chunk(self.header(chunk_id, entry), values, valid)

    def part(self, entry: Entry, row: int, rows: int) -> Values:
        """Rows of a chunk without null ones: no more than those are looked at."""
        size = self.layout.row_bytes
        first = entry.offset + entry.length - pad(entry.rows * size) + row * size
        values = np.frombuffer(self.memory(first, rows * size), self.layout.dtype)
        return values.reshape(rows, *self.item_shape)

    def header(self, chunk_id: ChunkId, entry: Entry) -> ChunkHeader:
        return trusted_header(
            chunk_id.hex, self.key.run, entry.epoch, self.key.field, entry.start, entry.rows, entry.checksum
        )

    def seal(self) -> None:
        """End the stream and give back what it did not use. Nothing is appended any more."""
        if self.sealed:
            return
        self.sealed = True
        end = 0
        if self._appender is not None:
            end = self._appender.end()
            self._appender = None
            self.written = []
        self.file.shrink(end)


def needed_bytes(layout: ColumnLayout, rows: int, nullable: bool) -> int:
    """Bytes that a chunk of so many rows may take at most, a first schema message included."""
    size: int = rows * layout.row_bytes + (rows // 8 if nullable else 0) + 2 * MESSAGE_SLACK_BYTES
    return size
