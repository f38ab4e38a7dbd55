"""Where a shard lives, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arrow_tq.client.tls import Tls
from arrow_tq_schemas.cluster import ShardServer


@dataclass(frozen=True, slots=True)
class ShardEngineConfig:
    """Where a shard lives, what it may use, and which catalog it joins.

    Args:
        data_dir: on disk: its name and number, sidecars, and the extents of disk-durable runs.
        catalog_url: the catalog.
        server: where clients reach this process.
        memory_dir: extents of the other runs; None: as before, else under ``data_dir``.
        capacity_bytes: payload bytes at most; None: four fifths of what is free.
        soft_mark: fill that is told to producers.
        orphan_ttl_s: age at which a chunk that no step attached is reaped.
        cache_bytes: chunks of other nodes kept for this node's readers at most; 0: none.
        token: what it shows to the catalog; one with ``admin`` for every run.
        tls: what it shows and checks on a TLS connection to it.
    """

    data_dir: Path
    catalog_url: str
    server: ShardServer
    memory_dir: Path | None = None
    capacity_bytes: int | None = None
    soft_mark: float = 0.85
    orphan_ttl_s: float = 600.0
    cache_bytes: int = 0
    token: str | None = None
    tls: Tls | None = None
