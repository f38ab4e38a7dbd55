"""The catalog's side of a cluster, as the engine uses it. No network code is imported without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from arrow_tq.store.catalog import Catalog
from arrow_tq.store.config import ClusterConfig, EngineConfig
from arrow_tq.store.holding import ChunkHolder, OneShard
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.cluster import (
    Beat,
    ChunkStates,
    ClusterMap,
    GetCluster,
    JoinCluster,
    Joined,
    LeaveCluster,
    News,
    ShardEntry,
    ShardServer,
    States,
)
from arrow_tq_schemas.commands import Command, Done, Wire
from arrow_tq_schemas.errors import Unsupported
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId

CLUSTER_COMMANDS = (GetCluster, JoinCluster, Beat, LeaveCluster, ChunkStates)


@runtime_checkable
class FarShards(Protocol):
    """What a ``ShardSet`` can beyond holding chunks."""

    def cluster_map(self) -> ClusterMap:
        """The map as it is now."""

    def join(self, command: JoinCluster) -> Joined:
        """A shard is there."""

    def beat(self, command: Beat) -> News:
        """A shard is still there; what it has to know."""

    def leave(self, command: LeaveCluster) -> None:
        """A shard ends in order."""

    def held(self, ids: list[ChunkId]) -> set[ChunkId]:
        """Those that a commit under way is about to attach."""

    def use_fields(self, fields: Callable[[str, str], Field]) -> None:
        """Who knows the declared fields."""

    def gauges(self) -> dict[str, float]:
        """Figures of each shard by name."""

    def far_stats(self) -> dict[str, float]:
        """What the far shards count themselves, added up by name."""

    def close(self) -> None:
        """Let go of threads and connections."""


def chunk_holder(config: EngineConfig, shard: Shard) -> ChunkHolder:
    """The chunks of a store: those here, or those here and on the shards that join."""
    cluster = config.cluster
    if cluster is None:
        return OneShard(shard)
    from arrow_tq.client.options import ClientOptions
    from arrow_tq.store.cluster.shard_map import ShardMap
    from arrow_tq.store.cluster.shard_set import ShardSet

    shard_map = ShardMap(
        *(config.data_dir, cluster.lease_s, cluster.fence_s), lambda: _own_entry(cluster, shard)
    )
    options = ClientOptions(connect_s=3.0)
    return ShardSet(shard, cluster.holds_chunks, shard_map, cluster.token, cluster.tls, options)


def answer_cluster(command: Command, chunks: ChunkHolder, catalog: Catalog) -> Wire:
    """Answer one of ``CLUSTER_COMMANDS``.

    Raises:
        Unsupported: nobody can join a store that is not served.
    """
    if isinstance(command, ChunkStates):
        ids = [ChunkId.from_hex(name) for name in command.ids]
        held = chunks.held(ids) if isinstance(chunks, FarShards) else set()
        # Looked at before the states: a commit that ends in between is seen as committed.
        states = catalog.chunk_states(ids, command.run)
        shown = [
            "held" if state is None and one in held else state for one, state in zip(ids, states, strict=True)
        ]
        return States.model_validate({"states": shown})
    if not isinstance(chunks, FarShards):
        raise Unsupported(f"{command.verb}: this store is open in one process and not served")
    if isinstance(command, JoinCluster):
        return chunks.join(command)
    if isinstance(command, Beat):
        return chunks.beat(command)
    if isinstance(command, LeaveCluster):
        chunks.leave(command)
        return Done(count=1)
    return chunks.cluster_map()


def _own_entry(cluster: ClusterConfig, shard: Shard) -> ShardEntry | None:
    if not cluster.holds_chunks:
        return None
    usage = shard.usage()
    return ShardEntry(
        number=shard.config.number,
        epoch=0,
        servers=[ShardServer(url=cluster.url, host=cluster.host)],
        capacity_bytes=usage.capacity_bytes,
        used_bytes=max(usage.used_bytes, 0),
        up=True,
    )
