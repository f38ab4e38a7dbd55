"""The messages of an IPC stream around bodies that are filled in place.

Arrow's own writer copies every buffer once more and needs the values before it can write the header. Here
the header is made first, for a body that does not exist yet: a message that pyarrow wrote for the same
schema serves as a template, and its numbers are replaced. The result is, byte for byte, what pyarrow
would write (``tests/property/test_layout.py``).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arrow_tq_schemas.errors import InternalError

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
PREFIX_BYTES = 8
"""Continuation marker and length of what follows, before every message."""
WORD = 8
_HEADER, _BODY_LENGTH, _METADATA = 2, 3, 4
"""Slots of the flatbuffer table ``Message``."""
_LENGTH, _NODES, _BUFFERS = 0, 1, 2
"""Slots of ``RecordBatch``."""
_VALUE = 1
"""Slot of ``KeyValue``."""
_INT64 = struct.Struct("<q")
TEMPLATES_MAX = 256
"""Templates kept, one a length of the custom metadata: only its decimal digits vary it."""


def pad(size: int) -> int:
    """Body buffers, and messages, are padded to 8 bytes."""
    return -(-size // WORD) * WORD


@functools.cache
def _integers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


@dataclass(frozen=True, slots=True)
class Template:
    """A message before its body, and the places of what differs from batch to batch."""

    raw: bytes
    rows: int
    nodes: int
    buffers: int
    body_length: int
    value: int

    def fill(
        self, rows: int, nodes: Sequence[int], buffers: Sequence[int], body_bytes: int, metadata: bytes
    ) -> bytearray:
        """The message before its body.

        Args:
            rows: of the batch.
            nodes: rows and null count of each node of the schema, flat: ``[rows, nulls, rows, nulls, ...]``.
            buffers: offset in the body and size of each buffer, flat likewise.
            body_bytes: of the body, padding included.
            metadata: value of the custom metadata, of the template's length.
        """
        raw = bytearray(self.raw)
        _INT64.pack_into(raw, self.rows, rows)
        _integers(len(nodes)).pack_into(raw, self.nodes, *nodes)
        _integers(len(buffers)).pack_into(raw, self.buffers, *buffers)
        _INT64.pack_into(raw, self.body_length, body_bytes)
        raw[self.value : self.value + len(metadata)] = metadata
        return raw


class BatchMessages:
    """Makes the record batch messages of one schema. Thread-safe.

    Args:
        schema: of the stream; fixed-width and ragged columns alike, no dictionaries.
        key: key of the custom metadata that every batch carries.
    """

    def __init__(self, schema: pa.Schema, key: bytes) -> None:
        self.schema = schema
        self._key = key
        self._templates: dict[int, Template] = {}

    def template(self, metadata_bytes: int) -> Template:
        """For custom metadata of that length."""
        found = self._templates.get(metadata_bytes)
        if found is None:
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            found = self._templates[metadata_bytes] = self._read_off(metadata_bytes)
        return found

    def _read_off(self, metadata_bytes: int) -> Template:
        """What pyarrow writes for a batch with metadata of that length."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            before = self.schema.serialize().size
            writer.write_batch(_sample(self.schema), custom_metadata={self._key: b"x" * metadata_bytes})
        stream = sink.getvalue().to_pybytes()
        (size,) = struct.unpack_from("<I", stream, before + 4)
        raw = stream[before : before + PREFIX_BYTES + size]
        message = _Table.root(raw, PREFIX_BYTES)
        batch = message.table(_HEADER)
        pair = _Table(raw, message.vector(_METADATA)).follow(0)
        return Template(
            raw,
            rows=batch.slot(_LENGTH),
            nodes=batch.vector(_NODES),
            buffers=batch.vector(_BUFFERS),
            body_length=message.slot(_BODY_LENGTH),
            value=pair.vector(_VALUE),
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """A flatbuffer table inside ``raw``, by the place where it begins."""

    raw: bytes
    place: int

    @classmethod
    def root(cls, raw: bytes, first: int) -> _Table:
        return cls(raw, first).follow(0)

    def follow(self, offset: int) -> _Table:
        """The table that the offset stored at ``place + offset`` leads to."""
        place = self.place + offset
        (distance,) = struct.unpack_from("<I", self.raw, place)
        return _Table(self.raw, place + int(distance))

    def slot(self, number: int) -> int:
        """Place of a field; every one asked for here is written, as its value is not the default."""
        (back,) = struct.unpack_from("<i", self.raw, self.place)
        vtable = self.place - back
        (size,) = struct.unpack_from("<H", self.raw, vtable)
        inside = 0
        if 4 + 2 * number < size:
            (inside,) = struct.unpack_from("<H", self.raw, vtable + 4 + 2 * number)
        if not inside:
            raise InternalError(f"Arrow's message has no field {number}")
        return self.place + int(inside)

    def table(self, number: int) -> _Table:
        return _Table(self.raw, self.slot(number)).follow(0)

    def vector(self, number: int) -> int:
        """Place of a vector's first element."""
        return _Table(self.raw, self.slot(number)).follow(0).place + 4


def _sample(schema: pa.Schema) -> pa.RecordBatch:
    """A batch of two rows: enough for every number in its message to be there."""
    return pa.RecordBatch.from_arrays([_rows_of(field.type) for field in schema], schema=schema)


def _rows_of(kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _rows_of(kind.storage_type))
    if pa.types.is_fixed_size_list(kind):
        size = 2 * kind.list_size
        value = pa.Array.from_buffers(
            kind.value_type, size, [None, _zeros(size * kind.value_type.bit_width // 8)]
        )
        return pa.Array.from_buffers(kind, 2, [None], children=[value])
    if pa.types.is_primitive(kind):
        # Not by fill_null: a scalar makes pyarrow import pandas, which takes half a second.
        return pa.Array.from_buffers(kind, 2, [None, _zeros(-(-2 * kind.bit_width // 8))])
    return pa.nulls(2, kind)


def _zeros(size: int) -> pa.Buffer:
    return pa.py_buffer(np.zeros(size, np.uint8))
