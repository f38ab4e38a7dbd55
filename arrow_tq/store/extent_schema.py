"""The schema of an extent, and how its damage is told.

A chunk's checksum covers its values, not their type: one flipped bit in a schema message turns int32 into
float32 and every checksum still fits. So the schema carries a digest of all that decides how values are
read, and a copy of it is kept beside the sidecars, for an extent whose own is damaged.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import xxhash

from arrow_tq.store.extent_key import ExtentKey, write_whole
from arrow_tq_schemas.errors import Conflict

DIGEST_KEY = b"arrow_tq.schema_digest"
COPY_NAME = "schema.ipc"
_UNREADABLE = (pa.ArrowException, OSError, ValueError, EOFError, KeyError, NotImplementedError, TypeError)
"""What pyarrow was seen to raise on schema messages with flipped bits."""


def stamp(schema: pa.Schema, key: ExtentKey) -> pa.Schema:
    """The same schema with its digest in the metadata."""
    return schema.with_metadata({DIGEST_KEY: _digest(schema, key)})


def read(content: pa.Buffer, key: ExtentKey) -> pa.Schema | None:
    """The stamped schema that ``content`` begins with; None where it is not there, or not as it was."""
    try:
        schema = pa.ipc.read_schema(pa.BufferReader(content))
        if len(schema) != 1 or (schema.metadata or {}).get(DIGEST_KEY) != _digest(schema, key):
            return None
    except _UNREADABLE:
        return None
    # Built anew: a flipped byte order is not in the digest, and would be taken over with the object.
    return pa.schema(list(schema), metadata=schema.metadata)


def keep_copy(folder: Path, schema: pa.Schema, key: ExtentKey) -> None:
    """Write the copy of a stamped schema, unless it is there.

    Raises:
        Conflict: chunks of this key were stored with another schema.
    """
    path = folder / COPY_NAME
    kept = read_copy(folder, key)
    if kept is None:
        write_whole(path, schema.serialize().to_pybytes(), durable=key.tier == "disk")
    elif not kept.equals(schema, check_metadata=True):
        raise Conflict(
            f"run {key.run!r}, field {key.field!r}, layer group {key.group}: stored as {kept.types}, "
            f"the new chunk is {schema.types} or has other layers"
        )


def read_copy(folder: Path, key: ExtentKey) -> pa.Schema | None:
    """The copy, or None where it is missing or damaged."""
    path = folder / COPY_NAME
    return read(pa.py_buffer(path.read_bytes()), key) if path.exists() else None


def _digest(schema: pa.Schema, key: ExtentKey) -> bytes:
    column = schema.field(0)
    tensor = isinstance(column.type, pa.BaseExtensionType)
    value = column.type.value_type if tensor else column.type
    metadata = {k.decode(): v.decode() for k, v in (column.metadata or {}).items()}
    told = [
        *(key.run, key.field, key.group, column.name, column.nullable, str(value)),
        *(list(column.type.shape) if tensor else None, sorted(metadata.items())),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(told).encode()).encode()
