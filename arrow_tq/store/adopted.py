"""Which chunks of a client's extent were adopted: what recovery believes of it, and nothing else.

A header, then one record a chunk, each with a digest of its own: appended before the chunk is shown, so that
a cut loses only what nobody was told of.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from arrow_tq.store import sidecar
from arrow_tq.store.extent import Entry, Extent
from arrow_tq_schemas.ids import ChunkId

HEAD = b"ATQG\x01\x00\x00\x00"
RECORD = np.dtype([("entry", sidecar.RECORD), ("digest", "<u8")])
_DIGEST, _digest = struct.Struct("<Q"), xxhash.xxh3_64_intdigest


def create(path: Path) -> None:
    """An empty log. It has to be there before its extent is: recovery walks extents without one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(HEAD)


def append(path: Path, located: Sequence[tuple[ChunkId, Entry]]) -> None:
    """Note chunks; kept whatever ends this process when it returns."""
    records = [raw + _DIGEST.pack(_digest(raw)) for raw in sidecar.records(located)]
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"".join(records))
    finally:
        os.close(descriptor)


def read(path: Path, extent: Extent) -> list[tuple[ChunkId, Entry]]:
    """The chunks of ``extent``, not verified yet; those up to the first damaged record."""
    content = path.read_bytes()
    if content[: len(HEAD)] != HEAD:
        return []
    whole = (len(content) - len(HEAD)) // RECORD.itemsize
    found = []
    for row in np.frombuffer(content, RECORD, whole, len(HEAD)):
        if int(row["digest"]) != _digest(row["entry"].tobytes()):
            break
        chunk_id, entry = sidecar.entry(row["entry"], extent)
        if entry.offset + entry.length <= extent.file.size_bytes:
            found.append((chunk_id, entry))
    return found
