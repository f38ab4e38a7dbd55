"""Settings and figures of a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Where a shard lives and what it may use.

    Args:
        data_dir: sidecars, and the extents of disk-durable runs.
        memory_dir: extents of the other runs.
        capacity_bytes: allocated bytes at most, both tiers together.
        number: the shard's number, 0 to 4095.
        extent_bytes: size at which an extent is full; a larger chunk gets one of its own.
        blob_extent_bytes: the same for blobs: many sessions share one, and a single one that lives long keeps
            its whole extent.
        grow_bytes: smallest step of allocation.
        ahead_bytes: how much memory is made ready ahead of a busy writer.
        recycle_bytes: memory of released extents kept for new ones of the same run.
        recycle_idle_s: such memory that nobody wanted for so long is given back.
        run_quota_bytes: allocated bytes of one run at most; None for no bound but the capacity.
        run_quotas: the same by run, where it differs.
        seal_idle_s: a live extent whose chunks are all dropped is sealed after so long without an append, or
            at once where its memory is needed.
    """

    data_dir: Path
    memory_dir: Path
    capacity_bytes: int
    number: int = 0
    extent_bytes: int = 256 << 20
    blob_extent_bytes: int = 4 << 20
    grow_bytes: int = 4 << 20
    ahead_bytes: int = 64 << 20
    seal_idle_s: float = 15.0
    recycle_bytes: int = 1 << 30
    recycle_idle_s: float = 300.0
    run_quota_bytes: int | None = None
    run_quotas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardUsage:
    """A shard's bytes and counts."""

    used_bytes: int
    """Allocated, what is kept for new extents not counted: that makes room when it is needed."""
    capacity_bytes: int
    recycled_bytes: int
    """Of released extents, kept for new ones."""
    zombie_bytes: int
    """Of unlinked extents that somebody still maps."""
    extents: int
    chunks: int
    corrupt_chunks: int
    """Chunks found damaged since start."""
    by_run_and_tier: dict[tuple[str, str], int]
    quotas: dict[str, tuple[int, int]]
    """By run that has a quota: used bytes, what is kept for its new extents included, and the quota."""
