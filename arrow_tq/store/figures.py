"""What a store counts: its statistics, and how full it is."""

from __future__ import annotations

from collections.abc import Collection

from arrow_tq.store.admission import Admission
from arrow_tq.store.bundles import EngineBundles
from arrow_tq.store.catalog import Catalog
from arrow_tq.store.cluster.answers import FarShards
from arrow_tq.store.holding import ChunkHolder
from arrow_tq.store.host_share import HostShare
from arrow_tq.store.reading import Reader
from arrow_tq.store.shard import Shard
from arrow_tq.store.upkeep import Upkeep
from arrow_tq_schemas.commands import Pressure


class Figures:
    """Collects what the parts of an engine count."""

    def __init__(
        self,
        shard: Shard,
        chunks: ChunkHolder,
        catalog: Catalog,
        reader: Reader,
        host_share: HostShare,
        bundles: EngineBundles,
        admission: Admission,
        upkeep: Upkeep,
        soft_mark: float,
    ) -> None:
        self._shard = shard
        self._chunks = chunks
        self._catalog = catalog
        self._reader = reader
        self._host_share = host_share
        self._bundles = bundles
        self._admission = admission
        self._upkeep = upkeep
        self._soft_mark = soft_mark

    def of_store(self) -> dict[str, float]:
        """Of the store: this process's statistics with those of the shards elsewhere."""
        values = self.of_process()
        if isinstance(self._chunks, FarShards):
            for name, value in self._chunks.far_stats().items():
                values[name] = values.get(name, 0.0) + value
        return values

    def of_process(self) -> dict[str, float]:
        """Of this process: gauges and counters by name, labels in braces as Prometheus writes them."""
        usage, gauges = self._chunks.usage(), self._catalog.gauges()
        values: dict[str, float] = {
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "zombie_bytes": usage.zombie_bytes,
            "recycled_bytes": usage.recycled_bytes,
            "extents": usage.extents,
            "chunks": usage.chunks,
            "corrupt_chunks_total": usage.corrupt_chunks,
            "lost_chunks": self._shard.recovery.lost_chunks,
            "lost_bytes": self._shard.recovery.lost_bytes,
            "open_sessions": gauges.open_sessions,
            "unclaimed_segments": gauges.unclaimed_segments,
            "oldest_unclaimed_s": gauges.oldest_unclaimed_s,
            "claim_waiters": gauges.waiters,
            "room_waiters": self._admission.waiting,
            "commits_total": gauges.commits,
            "chunks_read_total": self._reader.chunks_read,
            "bytes_read_total": self._reader.bytes_read,
            **self._host_share.counters(),
            "orphans_reaped_total": self._upkeep.orphans_reaped,
            "claims_active": gauges.claims_active,
            "claimed_segments": gauges.claimed_segments,
            "lease_ends_s": gauges.lease_ends_s,
            "marks_live": gauges.marks_live,
            "kept_segments": gauges.kept_segments,
            "kept_given_up_total": self._upkeep.kept_given_up,
        }
        for end, count in gauges.claims_by_end.items():
            values[f'claims_ended_total{{end="{end}"}}'] = count
        if isinstance(self._chunks, FarShards):
            values |= self._chunks.gauges()
        for (run, tier), size in usage.by_run_and_tier.items():
            values[f'bytes{{run="{run}",tier="{tier}"}}'] = size
        for run, (used_bytes, quota_bytes) in usage.quotas.items():
            values[f'run_used_bytes{{run="{run}"}}'] = used_bytes
            values[f'run_quota_bytes{{run="{run}"}}'] = quota_bytes
        values.update(self._bundles.stats())
        for reason, count in gauges.discarded_by_reason.items():
            values[f'discarded_total{{reason="{reason}"}}'] = count
        return values

    def pressure_of(self, runs: Collection[str]) -> Pressure:
        """The store's fill, with sessions and segments of these runs alone."""
        gauges = self._catalog.run_gauges(runs)
        return self.pressure().model_copy(
            update={
                "oldest_unclaimed_s": gauges.oldest_unclaimed_s,
                "open_sessions": gauges.open_sessions,
                "unclaimed_segments": gauges.unclaimed_segments,
            }
        )

    def pressure(self) -> Pressure:
        """How full the store is, and who waits."""
        usage, gauges = self._chunks.usage(), self._catalog.gauges()
        return Pressure(
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            fill=usage.used_bytes / usage.capacity_bytes,
            soft_mark=self._soft_mark,
            oldest_unclaimed_s=gauges.oldest_unclaimed_s,
            open_sessions=gauges.open_sessions,
            unclaimed_segments=gauges.unclaimed_segments,
            waiters=gauges.waiters + self._admission.waiting,
        )
