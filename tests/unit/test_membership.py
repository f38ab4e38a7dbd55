"""A shard's place in its cluster, with a catalog that answers when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, cast

import pytest

from arrow_tq.store.cluster.catalog_link import CatalogLink
from arrow_tq.store.cluster.membership import Membership
from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardConfig
from arrow_tq_schemas.cluster import Joined, ShardServer
from arrow_tq_schemas.errors import Unavailable

WAIT_S = 10.0


class SlowCatalog:
    """Counts on the shard as soon as it is asked, and says so when it is let."""

    url = "grpc://catalog:8815"

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def join(self, command: object) -> Joined:
        self.asked.set()
        assert self.answers.wait(WAIT_S)
        return Joined(number=3, epoch=1, lease_s=60.0, catalog="0" * 32)

    def beat(self, command: object) -> NoReturn:
        raise Unavailable("no news")

    def forget(self) -> None:
        """Nothing is kept."""


@pytest.fixture
def catalog() -> SlowCatalog:
    return SlowCatalog()


@pytest.fixture
def membership(tmp_path: Path, catalog: SlowCatalog) -> Iterator[Membership]:
    shard = Shard(ShardConfig(tmp_path / "data", tmp_path / "memory", 1 << 24))
    server = ShardServer(url="grpc://127.0.0.1:1", host="here")
    made = Membership(tmp_path / "data", server, cast(CatalogLink, catalog), shard, orphan_ttl_s=60)
    yield made
    catalog.answers.set()
    made.stop()
    shard.close()


def test_a_call_waits_for_a_join_that_is_under_way(membership: Membership, catalog: SlowCatalog) -> None:
    membership.start()
    assert catalog.asked.wait(WAIT_S)
    threading.Timer(0.2, catalog.answers.set).start()
    membership.check()
    assert membership.joined
    assert membership.number == 3


def test_a_shard_that_nobody_takes_in_says_so(membership: Membership) -> None:
    with pytest.raises(Unavailable, match="has not joined its catalog"):
        membership.check()
