"""Clusters of real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A catalog and three shards, of which nothing dies."""
    with Cluster(tmp_path_factory.mktemp("cluster"), 3) as running:
        yield running
        for server in [*running.shards, running.catalog]:
            assert server.stop() == 0
            assert "handler failed" not in server.log.read_text()
