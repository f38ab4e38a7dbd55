"""The sidecar of a sealed extent: where its chunks are, so that start-up need not walk it.

Layout, little-endian: ``ATQX``, u8 version, u32 length of the JSON head, the head (rows, extent bytes),
rows of ``RECORD``, then xxh3-64 of everything before.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.extent_key import write_whole
from arrow_tq_schemas.ids import ChunkId

MAGIC, VERSION = b"ATQX", 1
_HEAD = struct.Struct("<4sBI")
RECORD = np.dtype(
    [
        ("id", "V16"),
        ("checksum", "V16"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("start", "<u8"),
        ("epoch", "<u8"),
        ("rows", "<u4"),
        ("nullable", "u1"),
    ]
)
_RECORD = struct.Struct("<16s16sQQQQIB")
"""The same, to be written."""
Located = Sequence[tuple[ChunkId, Entry]]


def write(path: Path, extent: Extent, located: Located) -> None:
    """Write the sidecar, whole or not at all, and durably."""
    head = json.dumps({"rows": len(located), "used_bytes": extent.used_bytes}).encode()
    content = _HEAD.pack(MAGIC, VERSION, len(head)) + head + b"".join(records(located))
    content += xxhash.xxh3_64_digest(content)
    write_whole(path, content, durable=True)


def read(path: Path, extent: Extent) -> list[tuple[ChunkId, Entry]] | None:
    """The entries of ``extent``, not verified yet; None where the sidecar is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _HEAD.size + 8 or xxhash.xxh3_64_digest(content[:-8]) != content[-8:]:
        return None
    magic, version, length = _HEAD.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        return None
    head = json.loads(content[_HEAD.size : _HEAD.size + length])
    if head["used_bytes"] > extent.file.size_bytes:
        return None
    extent.used_bytes = head["used_bytes"]
    records = np.frombuffer(content[_HEAD.size + length : -8], RECORD, head["rows"])
    return [entry(one, extent) for one in records]


def records(located: Located) -> list[bytes]:
    """A ``RECORD`` for each."""
    return [
        _RECORD.pack(
            chunk_id.to_bytes(), bytes.fromhex(one.checksum), one.offset, one.length, one.start,
            one.epoch, one.rows, one.nullable,
        )
        for chunk_id, one in located
    ]  # fmt: skip


def entry(row: np.void, extent: Extent) -> tuple[ChunkId, Entry]:
    """The other way round; not verified yet."""
    return ChunkId.from_bytes(bytes(row["id"])), Entry(
        extent, int(row["offset"]), int(row["length"]), int(row["rows"]), bool(row["nullable"]),
        int(row["start"]), int(row["epoch"]), bytes(row["checksum"]).hex(), verified=False,
    )  # fmt: skip
