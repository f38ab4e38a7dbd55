"""Settings of an engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from arrow_tq.sql import SqlLimits
from arrow_tq_schemas.errors import InvalidInput

if TYPE_CHECKING:
    from arrow_tq.client.tls import Tls


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What the engine of a server needs so that shards in other processes may join it.

    Args:
        url: where clients reach this process.
        host: boot id of this machine.
        holds_chunks: whether this process is a shard of the cluster too, number 0.
        lease_s: a shard that was not heard of for so long is down.
        fence_s: one that was not heard of for so long answers nothing, and another process may be it.
        token: what this process shows to shards; one with ``admin`` for every run.
        tls: what it shows and checks on TLS connections to shards.
    """

    url: str
    host: str
    holds_chunks: bool = True
    lease_s: float = 5.0
    fence_s: float = 60.0
    token: str | None = None
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where a store lives and what it may use.

    Args:
        data_dir: on disk: catalog, sidecars, and the extents of disk-durable runs.
        memory_dir: extents of the other runs; None keeps them under ``data_dir``, or where the store had
            them before.
        capacity_bytes: payload bytes at most, both tiers together; None for four fifths of what the memory
            directory's filesystem has free at the start.
        soft_mark: fill (0 to 1) above which new sessions are refused, so that open ones can finish.
        run_quota_bytes: payload bytes of one run at most, what is made ready for it included; None for no
            bound but the capacity.
        run_quotas: the same by run, where it differs.
        memory_share: share of the host's memory (0 to 1) that the capacity never passes, whatever it says.
        url: what a second opener is told; a server's own URL.
        orphan_ttl_s: age at which a chunk that no step attached is reaped.
        upkeep_period_s: how often leases, expiries and orphans are looked after.
        blob_bytes_max: size of one blob (a file that a step refers to) at most.
        keep_marks: how many of a run's marks back what was released since is kept for a rewind; 0: none.
        keep_released_s: how long that is kept at most.
        sql: bounds of a SQL query.
        cluster: how shards in other processes join; None: nobody may.
    """

    data_dir: Path
    memory_dir: Path | None = None
    capacity_bytes: int | None = None
    soft_mark: float = 0.85
    run_quota_bytes: int | None = None
    run_quotas: Mapping[str, int] = field(default_factory=dict)
    memory_share: float | None = None
    url: str | None = None
    orphan_ttl_s: float = 600.0
    upkeep_period_s: float = 1.0
    blob_bytes_max: int = 64 << 20
    keep_marks: int = 1
    keep_released_s: float = 86_400.0
    sql: SqlLimits = field(default_factory=SqlLimits)
    cluster: ClusterConfig | None = None

    def __post_init__(self) -> None:
        if not 0 < self.soft_mark <= 1:
            raise InvalidInput(f"soft_mark {self.soft_mark}: expected more than 0 and at most 1")
        if self.capacity_bytes is not None and self.capacity_bytes < 1 << 20:
            raise InvalidInput(f"capacity_bytes {self.capacity_bytes}: expected at least 1 MiB")
        if self.keep_marks < 0 or self.keep_released_s <= 0:
            raise InvalidInput("keep_marks: expected 0 or more; keep_released_s: more than 0")
        quotas = [*self.run_quotas.values(), *([self.run_quota_bytes] if self.run_quota_bytes else [])]
        if self.run_quota_bytes == 0 or any(quota < 1 << 20 for quota in quotas):
            raise InvalidInput("run_quota_bytes and run_quotas: expected at least 1 MiB")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise InvalidInput(f"memory_share {self.memory_share}: expected more than 0 and at most 1")
        if self.orphan_ttl_s <= 0 or self.upkeep_period_s <= 0:
            raise InvalidInput("orphan_ttl_s and upkeep_period_s: expected more than 0")
        if self.blob_bytes_max <= 0:
            raise InvalidInput(f"blob_bytes_max {self.blob_bytes_max}: expected more than 0")

    @property
    def memory_bytes_max(self) -> int:
        """What ``memory_share`` comes to on this host."""
        if self.memory_share is None:
            return sys.maxsize
        return max(int(self.memory_share * psutil.virtual_memory().total), 1 << 20)
