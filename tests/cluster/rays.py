"""Ray clusters of several nodes on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from arrow_tq.calls import ask
from arrow_tq.interface import Store
from arrow_tq_schemas.cluster import ClusterMap, GetCluster

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
DISK = "DISK"
"""Variable of a node that has a disk of its own: where that is."""


@contextmanager
def ray_nodes(count: int, disks: Path | None = None) -> Iterator[Any]:
    """So many nodes, this process connected to the first; gives the ``Cluster``.

    With ``disks`` each node has a folder of its own there (``$DISK``), and each but the first an address of
    its own.
    """
    pytest.importorskip("ray", reason="needs the extra ray")
    root = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        # No reports home, and no token file in the home directory.
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join([root, f"{root}/schemas", f"{root}/server"]))
        import ray
        from ray.cluster_utils import Cluster

        head = {**NODE, "include_dashboard": False}
        if disks is not None:
            head["env_vars"] = {DISK: str(disks / "1")}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for index in range(1, count):
                cluster.add_node(**(NODE if disks is None else node_with_disk(disks, index + 1)))
            ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def node_with_disk(disks: Path, index: int) -> dict[str, object]:
    """Arguments of node ``index``, whose address and disk are the same each time it starts."""
    return {**NODE, "node_ip_address": f"127.0.0.{index}", "env_vars": {DISK: str(disks / str(index))}}


def cluster_map(store: Store) -> ClusterMap:
    return ask(store._backend, GetCluster(), ClusterMap)


def up(store: Store) -> list[int]:
    """Numbers of the shards that are up."""
    return [one.number for one in cluster_map(store).shards if one.up]


def actors(name: str, count: int) -> dict[int, Any]:
    """The actors of a store's shards, by their index."""
    import ray

    return {index: ray.get_actor(f"{name}.shard-{index}", namespace="arrow-tq") for index in range(count)}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
