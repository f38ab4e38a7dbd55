"""A chunk: write-once rows of one field (one layer group), the unit of atomicity.

As Arrow it is one record batch of one column (``Field.arrow_schema``); what identifies it travels
beside it as a ``ChunkHeader``: in the batch's custom metadata at rest, in app_metadata on the wire.

The checksum is xxh3-128, computed over *values*, never over IPC bytes (equal arrays were seen to give
IPC bodies of different size). What is hashed, in order, integers little-endian::

    "atq1"                              4 bytes
    chunk id                            16 bytes, big-endian
    run, field                          each u32 length, then UTF-8
    epoch, start position, rows         u64 each
    has_validity                        u8; 0: every row is valid and no bits follow
    validity                            ceil(rows / 8) bytes, bit i of byte i // 8, 1 = valid, tail zero
    values                              C order, rows x item, null rows all zero
"""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError
from pydantic_core import to_json

from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.trusted import trusted

_U32, _U64_3 = struct.Struct("<I"), struct.Struct("<QQQ")
METADATA_KEY = b"arrow_tq.chunk"
WRITERS_MAX = 256
"""Runs and fields whose constant parts of headers and checksums are kept."""
Hex128 = Annotated[str, Bound(pattern=r"^[0-9a-f]{32}$")]
_COUNT_END = 1 << 48
Count = Annotated[int, Bound(ge=0, lt=_COUNT_END)]


class ChunkHeader(BaseModel):
    """Everything about a chunk but its values."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Annotated[int, Bound(ge=1, le=1)] = 1
    id: Hex128
    """Chunk id, hex."""
    run: Annotated[str, Bound(min_length=1, max_length=128)]
    epoch: Count
    """Epoch of the run in which the writer joined."""
    field: Annotated[str, Bound(min_length=1, max_length=64)]
    start: Count
    """Absolute token position of row 0."""
    rows: Annotated[int, Bound(ge=1, lt=1 << 31)]
    checksum: Hex128
    token: Annotated[str, Bound(max_length=64)] = ""
    """Put token: fences a stale attempt. Not part of the checksum."""

    @property
    def chunk_id(self) -> ChunkId:
        return ChunkId.from_hex(self.id)

    def to_bytes(self) -> bytes:
        if self.token:
            return self.model_dump_json(exclude_defaults=True).encode()
        parts = header_parts(self.run, self.epoch, self.field)
        return header_json(parts, self.id, self.start, self.rows, self.checksum)

    @classmethod
    def from_bytes(cls, raw: bytes) -> ChunkHeader:
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise MalformedMessage(f"chunk header: {explain(error)}") from None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk in memory.

    ``values`` is ``[rows, *field.group_shape(group)]`` in the storage dtype, C-contiguous, null rows
    zero; ``valid`` is ``[rows]`` bool, or None where every row is valid.
    """

    header: ChunkHeader
    values: npt.NDArray[np.generic]
    valid: npt.NDArray[np.bool_] | None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def to_batch(self, field: Field) -> pa.RecordBatch:
        """One record batch over the same memory (validity bits are packed anew)."""
        schema = field.arrow_schema(self.header.chunk_id.group)
        return pa.RecordBatch.from_arrays(
            [to_array(self.values, self.valid, schema.field(0).type)], schema=schema
        )


def to_array(
    values: npt.NDArray[np.generic], valid: npt.NDArray[np.bool_] | None, kind: pa.DataType
) -> pa.Array:
    """An Arrow array of type ``kind`` over ``values`` (``[rows, *item]``), without a copy of them."""
    rows = values.shape[0]
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    data = pa.py_buffer(values.reshape(-1))
    if not isinstance(kind, pa.BaseExtensionType):
        return pa.Array.from_buffers(kind, rows, [bits, data])
    storage = kind.storage_type
    flat = pa.Array.from_buffers(storage.value_type, rows * storage.list_size, [None, data])
    return pa.ExtensionArray.from_storage(kind, pa.Array.from_buffers(storage, rows, [bits], children=[flat]))


def from_array(
    array: pa.Array, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_] | None]:
    """``(values, valid)`` of an Arrow array made by ``to_array``: views of it, read-only.

    A sliced array gives its own rows. ``valid`` is None where there are no nulls.
    """
    rows = len(array)
    valid: npt.NDArray[np.bool_] | None = None
    if array.null_count:
        bits = np.frombuffer(array.buffers()[0], dtype=np.uint8)
        unpacked = np.unpackbits(bits, bitorder="little", count=array.offset + rows)
        valid = unpacked[array.offset :].view(np.bool_)
    flat = array.storage if isinstance(array, pa.ExtensionArray) else array
    first = flat.offset
    if shape:
        width = flat.type.list_size
        child = flat.values
        first = first * width + child.offset
        data, kind, count = child.buffers()[1], child.type, rows * width
    else:
        data, kind, count = flat.buffers()[1], flat.type, rows
    dtype = np.dtype(kind.to_pandas_dtype())
    if data is None:
        return np.zeros((rows, *shape), dtype), valid
    values = np.frombuffer(data, dtype=dtype, count=count, offset=first * dtype.itemsize)
    values.flags.writeable = False
    return values.reshape(rows, *shape), valid


def checksum(
    chunk_id: ChunkId,
    run: str,
    epoch: int,
    field: str,
    start: int,
    values: npt.NDArray[np.generic],
    valid: npt.NDArray[np.bool_] | None,
) -> str:
    """xxh3-128 of a chunk, as 32 hex digits; the module's docstring says over what.

    ``values`` must be C-contiguous and little-endian with null rows zeroed.
    """
    digest = begin_checksum(chunk_id, run, epoch, field, start, values.shape[0], valid)
    digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def begin_checksum(
    chunk_id: ChunkId,
    run: str,
    epoch: int,
    field: str,
    start: int,
    rows: int,
    valid: npt.NDArray[np.bool_] | None = None,
) -> xxhash.xxh3_128:
    """A digest that has seen all of a chunk but its values, which may then come in pieces."""
    bits = b"\x00"
    if valid is not None and not valid.all():
        bits = b"\x01" + np.packbits(valid, bitorder="little").tobytes()
    names = _hashed_names(run, field)
    return xxhash.xxh3_128(
        b"atq1%b%b%b%b" % (chunk_id.to_bytes(), names, _U64_3.pack(epoch, start, rows), bits)
    )


@functools.lru_cache(WRITERS_MAX)
def _hashed_names(run: str, field: str) -> bytes:
    run_bytes, field_bytes = run.encode(), field.encode()
    return b"".join((_U32.pack(len(run_bytes)), run_bytes, _U32.pack(len(field_bytes)), field_bytes))


@functools.lru_cache(WRITERS_MAX)
def header_parts(run: str, epoch: int, field: str) -> tuple[bytes, bytes]:
    """The constant parts of the JSON of headers of one writer, for ``header_json``."""
    said = f',"run":{to_json(run).decode()},"epoch":{epoch},"field":{to_json(field).decode()},"start":'
    return b'{"id":"', b'"' + said.encode()


def header_json(parts: tuple[bytes, bytes], id: str, start: int, rows: int, checksum: str) -> bytes:
    """``ChunkHeader.to_bytes`` of trusted values: 1 us instead of 6."""
    return b'%b%b%b%d,"rows":%d,"checksum":"%b"}' % (
        *(parts[0], id.encode(), parts[1], start, rows, checksum.encode()),
    )


def header_bytes(parts: tuple[bytes, bytes], start: int, rows: int) -> int:
    """Length of ``header_json``, whichever id and checksum it will have."""
    return len(parts[0]) + len(parts[1]) + len(str(start)) + len(str(rows)) + _REST_BYTES


_REST_BYTES = len(header_json((b"", b""), 32 * "0", 0, 0, 32 * "0")) - 2
"""Of what ``header_json`` adds to its parts and its two numbers."""


def trusted_header(
    id: str, run: str, epoch: int, field: str, start: int, rows: int, checksum: str
) -> ChunkHeader:
    """A ``ChunkHeader`` of values that its maker vouches for."""
    return trusted(
        ChunkHeader,
        {
            "v": 1, "id": id, "run": run, "epoch": epoch, "field": field, "start": start, "rows": rows,
            "checksum": checksum, "token": "",
        },
    )  # fmt: skip


class HeaderForm:
    """Reads headers of one run, epoch and field: 1 us each where they are in the form that is stored."""

    def __init__(self, run: str, epoch: int, field: str) -> None:
        self._said = run, epoch, field
        before, after = header_parts(run, epoch, field)
        number = rb"(0|[1-9][0-9]{0,14})"
        pattern = rb'%b([0-9a-f]{32})%b%b,"rows":([1-9][0-9]{0,8}),"checksum":"([0-9a-f]{32})"}'
        self._match = re.compile(pattern % (re.escape(before), re.escape(after), number)).fullmatch

    def parts(self, raw: bytes) -> tuple[str, int, int, str] | None:
        """Id, start, rows and checksum; None for any that is not of this form, whatever it is."""
        found = self._match(raw)
        if found is None:
            return None
        name, start, rows, checksum = found.groups()
        position = int(start)
        if position >= _COUNT_END:
            return None
        return name.decode(), position, int(rows), checksum.decode()

    def read(self, raw: bytes) -> ChunkHeader | None:
        """The header; None as ``parts``."""
        found = self.parts(raw)
        return None if found is None else trusted_header(found[0], *self._said, *found[1:])


@functools.lru_cache(WRITERS_MAX)
def header_form(run: str, epoch: int, field: str) -> HeaderForm:
    """The form of one writer's headers."""
    return HeaderForm(run, epoch, field)


def verify(chunk: Chunk) -> bool:
    """Whether the chunk's values have the checksum that its header says."""
    header = chunk.header
    seen = checksum(
        *(header.chunk_id, header.run, header.epoch, header.field, header.start), chunk.values, chunk.valid
    )
    return seen == header.checksum


def explain(error: ValidationError) -> str:
    """A pydantic error as one line: where, what, and the value."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "(whole)"
    more = f" (+{error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {first['msg']}, got {str(first.get('input'))[:120]!r}{more}"
