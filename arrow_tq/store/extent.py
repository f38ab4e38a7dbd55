"""An extent: one Arrow IPC stream in a mapped file, a record batch a chunk."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field as slot
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.store.extent_key import ExtentKey
from arrow_tq.store.mapped_file import MappedFile
from arrow_tq.store.space import Space
from arrow_tq_schemas.chunks import METADATA_KEY, Chunk, ChunkHeader, to_array
from arrow_tq_schemas.errors import InternalError
from arrow_tq_schemas.ids import ChunkId

MESSAGE_SLACK_BYTES = 4096
"""More than a batch's message takes beside its body, and than the end-of-stream marker."""
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_WORD = 8


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
    item_shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    used_bytes: int = 0
    chunks: int = 0
    sealed: bool = False
    retired: bool = False
    """Without chunks, and soon without its file."""
    appended_at: float = slot(default_factory=time.monotonic)
    view: memoryview = slot(init=False)
    """Of this extent's own mapping: its file may become another extent's, with another mapping."""
    written: list[ChunkId] = slot(default_factory=list)
    """Ids in the order of their appends, while it is live."""
    _sink: pa.FixedSizeBufferWriter | None = None
    _writer: pa.ipc.RecordBatchStreamWriter | None = None

    @classmethod
    def create(
        cls, key: ExtentKey, number: int, path: Path, schema: pa.Schema, size_bytes: int, space: Space
    ) -> Extent:
        """A new live extent, still without blocks."""
        return cls.over(key, number, MappedFile.create(path, size_bytes, space), schema)

    @classmethod
    def over(cls, key: ExtentKey, number: int, file: MappedFile, schema: pa.Schema) -> Extent:
        """A new live extent in a file that has blocks already."""
        return cls._of(key, number, file, schema)

    @classmethod
    def reopen(cls, key: ExtentKey, number: int, file: MappedFile, schema: pa.Schema) -> Extent:
        """A sealed extent of an earlier process."""
        extent = cls._of(key, number, file, schema)
        extent.sealed = True
        return extent

    @classmethod
    def _of(cls, key: ExtentKey, number: int, file: MappedFile, schema: pa.Schema) -> Extent:
        kind = schema.field(0).type
        shape = tuple(kind.shape) if isinstance(kind, pa.BaseExtensionType) else ()
        value = kind.value_type if isinstance(kind, pa.BaseExtensionType) else kind
        return cls(key, number, file, schema, shape, np.dtype(value.to_pandas_dtype()))

    def __post_init__(self) -> None:
        self.view = self.file.view

    @property
    def rest_bytes(self) -> int:
        return self.file.size_bytes - self.used_bytes

    @staticmethod
    def needed_bytes(chunk: Chunk) -> int:
        """Bytes that appending ``chunk`` may take at most, a first schema message included."""
        valid = 0 if chunk.valid is None else len(chunk.valid) // 8
        return chunk.values.nbytes + valid + 2 * MESSAGE_SLACK_BYTES

    def append(self, chunk: Chunk) -> Entry:
        """Write the chunk's batch; its blocks must be allocated. The entry is for the index."""
        header = chunk.header
        # Arrow writes no validity bits where nothing is null.
        nullable = chunk.valid is not None and not chunk.valid.all()
        if self._writer is None or self._sink is None:
            self._sink = pa.FixedSizeBufferWriter(pa.py_buffer(self.file.map))
            self._writer = pa.ipc.new_stream(self._sink, self.schema)
        if not self.used_bytes:
            self._write_first(chunk)
        else:
            self._write(chunk)
        offset, self.used_bytes = self.used_bytes, self._sink.tell()
        self.appended_at = time.monotonic()
        self.written.append(header.chunk_id)
        return Entry(
            self, offset, self.used_bytes - offset, header.rows, nullable, header.start,
            header.epoch, header.checksum, verified=True,
        )  # fmt: skip

    def chunk(self, chunk_id: ChunkId, entry: Entry) -> Chunk:
        """The chunk at ``entry``: read-only views of the mapping. Raises ``ValueError`` once unmapped."""
        count = entry.rows * int(np.prod(self.item_shape, dtype=np.int64))
        size = count * self.dtype.itemsize
        end = entry.offset + entry.length
        values = np.frombuffer(self.view, self.dtype, count, end - _pad(size))
        valid: npt.NDArray[np.bool_] | None = None
        if entry.nullable:
            first = end - _pad(size) - _pad(-(-entry.rows // 8))
            bits = np.frombuffer(self.view, np.uint8, -(-entry.rows // 8), first)
            valid = np.unpackbits(bits, bitorder="little", count=entry.rows).view(np.bool_)
        return Chunk(self.header(chunk_id, entry), values.reshape(entry.rows, *self.item_shape), valid)

    def header(self, chunk_id: ChunkId, entry: Entry) -> ChunkHeader:
        return ChunkHeader.model_construct(
            v=1, id=chunk_id.hex, run=self.key.run, epoch=entry.epoch, field=self.key.field,
            start=entry.start, rows=entry.rows, checksum=entry.checksum, token="",
        )  # fmt: skip

    def seal(self) -> None:
        """End the stream and give back what it did not use. Nothing is appended any more."""
        if self.sealed:
            return
        self.sealed = True
        if self._writer is not None:
            self._writer.close()
            assert self._sink is not None
            end = self._sink.tell()
            self._writer = self._sink = None
            self.written = []
            self.file.shrink(end)
        else:
            self.file.shrink(0)

    def _write_first(self, chunk: Chunk) -> None:
        """The writer sends its schema message with the first batch: find out where the batch begins."""
        self._write(chunk)
        (size,) = struct.unpack_from("<I", self.file.map, 4)
        self.used_bytes = _WORD + size

    def _write(self, chunk: Chunk) -> None:
        assert self._writer is not None and self._sink is not None
        array = to_array(chunk.values, chunk.valid, self.schema.field(0).type)
        batch = pa.RecordBatch.from_arrays([array], schema=self.schema)
        header = chunk.header.model_copy(update={"token": ""}) if chunk.header.token else chunk.header
        self._writer.write_batch(batch, custom_metadata={METADATA_KEY: header.to_bytes()})
        if self._sink.tell() > self.file.allocated_bytes:
            raise InternalError(f"chunk {header.id}: a message larger than was allocated for it")


def _pad(size: int) -> int:
    """Body buffers are padded to 8 bytes."""
    return -(-size // _WORD) * _WORD
