"""Where chunks lie in files that a client on the same host may map."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.ids import ChunkId

LOCATION_DTYPE = np.dtype(
    [
        ("extent", "<u4"),
        ("rows", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("start", "<u8"),
        ("epoch", "<u8"),
        ("checksum", "V16"),
        ("nullable", "u1"),
    ]
)
"""extent: index in the reply's list; offset, length: of the chunk's message in the file; the rest is what its
checksum is over, beside id, run and field. One row a chunk, in the order asked."""

Locations = npt.NDArray[np.void]
IDS_MAX = 1 << 20


def pack_ids(ids: Sequence[ChunkId]) -> str:
    """Base64 of 16 bytes each."""
    return base64.b64encode(b"".join([one.to_bytes() for one in ids])).decode()


def unpack_ids(text: str) -> list[ChunkId]:
    """Raises ``MalformedMessage`` for what ``pack_ids`` did not make."""
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise MalformedMessage(f"chunk ids: {error}") from None
    if len(raw) % 16 or len(raw) > 16 * IDS_MAX:
        raise MalformedMessage(f"chunk ids of {len(raw)} bytes: expected 16 each, {IDS_MAX} at most")
    return [ChunkId.from_bytes(raw[first : first + 16]) for first in range(0, len(raw), 16)]


def unpack_locations(raw: bytes, ids: int, extents: int) -> Locations:
    """One row an id, each in one of the extents; raises ``MalformedMessage`` otherwise."""
    if len(raw) != ids * LOCATION_DTYPE.itemsize:
        raise MalformedMessage(f"locations of {len(raw)} bytes for {ids} chunks")
    found = np.frombuffer(raw, LOCATION_DTYPE)
    if ids and int(found["extent"].max()) >= extents:
        raise MalformedMessage(f"locations in extent {int(found['extent'].max())} of {extents}")
    return found
