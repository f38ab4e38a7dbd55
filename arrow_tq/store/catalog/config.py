"""Settings of a catalog, and what it needs from the shard beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields as dataclass_fields
from pathlib import Path
from typing import Protocol

from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.ids import ChunkId


@dataclass(frozen=True, slots=True)
class CatalogConfig:
    """Where a catalog lives, and its bounds.

    Args:
        path: the SQLite file; its ``-wal`` and ``-shm`` files are beside it.
        request_ttl_s: how long the reply to a request id is kept for a retry.
        commit_batch_max: operations in one transaction at most.
        queue_max: operations that wait for the writer at most; the next caller waits for room.
        queue_wait_s: how long a caller waits for that room before ``Busy``.
        readers_max: connections that read at the same time at most.
        reader_wait_s: how long a reader waits for one before ``Busy``.
        paths_cached_max: steps whose path's token spans are kept in memory at most.
        path_spans_cached_max: spans of all of these together at most.
        wal_bytes_max: size of the write-ahead log from which a commit itself checkpoints it.
        gauges_ttl_s: age at which gauges are counted again.
        blob_bytes_max: size of one blob at most.
        keep_marks: how many marks of a run back what was released since is kept for a rewind; 0: none.
        keep_released_s: how long that is kept at most.
    """

    path: Path
    request_ttl_s: float = 3600.0
    commit_batch_max: int = 512
    queue_max: int = 4096
    queue_wait_s: float = 30.0
    readers_max: int = 8
    reader_wait_s: float = 30.0
    paths_cached_max: int = 4096
    path_spans_cached_max: int = 1 << 20
    wal_bytes_max: int = 64 << 20
    gauges_ttl_s: float = 0.25
    blob_bytes_max: int = 64 << 20
    keep_marks: int = 1
    keep_released_s: float = 86_400.0

    def __post_init__(self) -> None:
        for slot in dataclass_fields(self):
            value = getattr(self, slot.name)
            if slot.name not in ("path", "keep_marks") and value <= 0:
                raise InvalidInput(f"{slot.name} {value}: expected more than 0")
        if self.keep_marks < 0:
            raise InvalidInput(f"keep_marks {self.keep_marks}: expected 0 or more")


class ChunkPins(Protocol):
    """The part of a shard that the catalog uses: which chunks are there, and which a step attached."""

    def pin(self, ids: Sequence[ChunkId]) -> list[ChunkId]:
        """Mark chunks as attached. The ids that are missing; where there are any, none is marked."""

    def unpin(self, ids: Sequence[ChunkId]) -> None:
        """Take the marks back."""

    def header(self, chunk_id: ChunkId) -> ChunkHeader | None:
        """The header of a chunk that is there."""

    def holds(self, chunk_id: ChunkId) -> bool:
        """Whether an attached chunk is where it was stored, as far as is known without asking far."""

    def sha256(self, ids: Sequence[ChunkId]) -> str:
        """Digest, as hex, of these chunks' values one after another; of what is not there, nothing."""


@dataclass(frozen=True, slots=True)
class CatalogGauges:
    """What the catalog holds now."""

    open_sessions: int
    unclaimed_segments: int
    """Segments that some task may still claim."""
    oldest_unclaimed_s: float
    """Age of the oldest of them; 0 where there is none."""
    waiters: int
    """Claims that wait for segments."""
    discarded_by_reason: dict[str, int]
    """Segments discarded, and sessions that ended without segments, since the store was made."""
    commits: int
    """Steps committed since this catalog was opened."""
    claims_active: int
    """Claims under a lease that hold segments."""
    claimed_segments: int
    """Pairs of segment and task under those claims."""
    lease_ends_s: float
    """Seconds until the first of their leases ends, unless it is renewed; 0 where there is none."""
    claims_by_end: dict[str, int]
    """Claims with segments that ended, by how: done, expired, rewound."""
    marks_live: int
    """Marks that a run can be rewound to."""
    kept_segments: int
    """Pairs of segment and task that were released and are kept for a rewind."""
