"""A shard's calls to its catalog, by a connection that says what the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from arrow_tq.client.connection import Connection
from arrow_tq.store.cluster import catalog_link
from arrow_tq.store.cluster.catalog_link import CatalogLink
from arrow_tq_schemas.commands import Reply, RunInfo, pack_reply
from arrow_tq_schemas.errors import DeadlineExceeded, Unavailable


class Line:
    """Answers with a run, or after its deadline not at all."""

    url = "grpc://catalog:8815"

    def __init__(self) -> None:
        self.deadlines: list[float] = []
        self.is_silent = False

    def retrying(self, call: Callable[[], bytes]) -> bytes:
        return call()

    def action(self, verb: str, body: bytes, deadline_s: float) -> bytes:
        self.deadlines.append(deadline_s)
        if self.is_silent:
            raise DeadlineExceeded(f"{verb}: no answer within {deadline_s} s")
        info = RunInfo(run="r", fields=[], tasks=[], durability="process", epoch=2, policy_version=None)
        return pack_reply(Reply(body=info))


def test_what_is_known_of_a_run_is_used_while_a_catalog_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    link = CatalogLink(cast(Connection, line))
    line.is_silent = True
    with pytest.raises(Unavailable):
        link.run_info("r")
    line.is_silent = False
    known = link.run_info("r")
    line.is_silent = True
    monkeypatch.setattr(catalog_link, "RUN_S", -1.0)
    line.deadlines.clear()
    assert link.run_info("r") == known
    assert line.deadlines == [catalog_link.AGAIN_S]
    # The next calls do not wait for it either; but for news that they have of it.
    monkeypatch.setattr(catalog_link, "RUN_S", 600.0)
    for _ in range(3):
        assert link.run_info("r", epoch=2) == known
    assert len(line.deadlines) == 1
    assert link.run_info("r", epoch=3) == known
    assert len(line.deadlines) == 2
