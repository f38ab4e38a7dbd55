"""Ray clusters of several nodes on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@contextmanager
def ray_nodes(count: int) -> Iterator[Any]:
    """So many nodes, this process connected to the first; gives the ``Cluster``."""
    pytest.importorskip("ray", reason="needs the extra ray")
    root = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        # No reports home, and no token file in the home directory.
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join([root, f"{root}/schemas", f"{root}/server"]))
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            for _ in range(count - 1):
                cluster.add_node(**NODE)
            ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
