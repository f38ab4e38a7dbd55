"""The conformance suite on a catalog and four shards, each a process of its own.

Every test gets an empty store: its catalog starts anew without any metadata, and the shards, which know
their numbers, join it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

import arrow_tq
from arrow_tq.interface import Store
from arrow_tq.testing.conformance import StoreConformance
from arrow_tq.testing.conformance.concurrency import ConcurrencyConformance
from arrow_tq.testing.scenes import wait_until
from tests.clusters import Cluster

ORPHAN_TTL_S = 4


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("four"), 4, "--set", f"orphan_ttl_s={ORPHAN_TTL_S}") as running:
        # The map has a shard's number a moment before the shard itself: without it, it would ask the next
        # catalog for another shard's.
        notes = [server.data_dir / "shard.json" for server in running.shards]
        wait_until(lambda: all(json.loads(note.read_text()).get("number") for note in notes))
        yield running


@pytest.fixture
def store(four: Cluster) -> Iterator[Store]:
    four.catalog.kill()
    shutil.rmtree(four.catalog.data_dir)
    shutil.rmtree(four.catalog.memory_dir, ignore_errors=True)
    four.start_catalog()
    four.wait()
    with arrow_tq.connect(four.url) as opened:
        # What the test before wrote belongs to nobody now. A shard that does not answer counts none.
        wait_until(lambda: is_empty(opened.stats()), 60)
        yield opened


def is_empty(stats: dict[str, float]) -> bool:
    up = [value for name, value in stats.items() if name.startswith("shard_up{")]
    return up == [1.0] * 4 and stats["chunks"] == 0


class TestConcurrencyOnFourShards(ConcurrencyConformance):
    """Many at a time."""


@pytest.mark.slow
class TestFourShards(StoreConformance):
    """All of it."""
