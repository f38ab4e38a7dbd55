"""A shard's place in its cluster, with a catalog and a clock that say what the test says."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from arrow_tq.backend import Rows
from arrow_tq.store.cluster import membership as membership_module
from arrow_tq.store.cluster.catalog_link import CatalogLink
from arrow_tq.store.cluster.held import held, held_rows
from arrow_tq.store.cluster.membership import Membership
from arrow_tq.store.cluster.place import clock_s
from arrow_tq.store.directory import Directory
from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardConfig
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas.cluster import Beat, JoinCluster, Joined, LeaveCluster, News, ShardServer
from arrow_tq_schemas.errors import ChunkLost, StaleEpoch, Unavailable

WAIT_S = 10.0
LEASE_S, FENCE_S = 60.0, 600.0
CATALOG, LOCK = "0" * 32, "1" * 32


class Clock:
    """Stands still but for what it is told."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds


class SlowCatalog:
    """Counts on the shard as soon as it is asked, and says so when it is let."""

    url = "grpc://catalog:8815"

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.beats: Callable[[], News] = self.is_away
        self.left: list[LeaveCluster] = []
        self.count = 0

    def join(self, command: JoinCluster) -> Joined:
        assert command.lock == LOCK
        self.asked.set()
        assert self.answers.wait(WAIT_S)
        return Joined(number=3, epoch=1, lease_s=LEASE_S, fence_s=FENCE_S, catalog=CATALOG)

    def beat(self, command: Beat) -> News:
        assert command.lock == LOCK
        self.count += 1
        return self.beats()

    def leave(self, command: LeaveCluster) -> None:
        self.left.append(command)

    def forget(self) -> None:
        """Nothing is kept."""

    def is_away(self) -> News:
        raise Unavailable("no news")

    def counts_on_it(self) -> News:
        return News(last=0, catalog=CATALOG)

    def has_another(self) -> News:
        raise StaleEpoch("shard 3: epoch 1 is over", epoch=1, current=2)


@pytest.fixture
def catalog() -> SlowCatalog:
    return SlowCatalog()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def membership(tmp_path: Path, catalog: SlowCatalog, clock: Clock) -> Iterator[Membership]:
    shard = Shard(ShardConfig(tmp_path / "data", tmp_path / "memory", 1 << 24))
    server = ShardServer(url="grpc://127.0.0.1:1", host="here")
    made = Membership(
        *(tmp_path / "data", LOCK, server, cast(CatalogLink, catalog), shard), orphan_ttl_s=60, clock=clock
    )
    yield made
    catalog.answers.set()
    made.stop()
    shard.close()


@pytest.fixture
def joined(membership: Membership, catalog: SlowCatalog) -> Membership:
    catalog.answers.set()
    membership.start()
    wait_until(lambda: membership.joined)
    return membership


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


def test_without_its_catalog_it_answers_until_another_may_be_the_shard(
    joined: Membership, catalog: SlowCatalog, clock: Clock
) -> None:
    joined.check_named(3, 1)
    clock.pass_by(LEASE_S + 1)
    catalog.count = 0
    for _ in range(20):
        joined.check()
    assert catalog.count <= 5, "the thread asks, and not every call"
    clock.pass_by(FENCE_S - LEASE_S - 2)
    for check in (joined.check, lambda: joined.check_named(3, 1)):
        with pytest.raises(
            Unavailable, match="may not be shard 3 any more: its catalog at grpc://catalog:8815"
        ):
            check()
    assert joined.joined, "it may have its place still"


def test_an_answer_that_was_read_late_is_as_old_as_its_question(
    membership: Membership, catalog: SlowCatalog, clock: Clock
) -> None:
    """The process was stopped after the catalog answered and before it saw that."""
    membership.start()
    assert catalog.asked.wait(WAIT_S)
    clock.pass_by(FENCE_S)
    catalog.answers.set()
    wait_until(lambda: membership.joined)
    with pytest.raises(Unavailable, match="may not be shard 3 any more"):
        membership.check()
    catalog.beats = catalog.counts_on_it
    wait_until(lambda: _answers(membership))

    def late() -> News:
        clock.pass_by(FENCE_S)
        return catalog.counts_on_it()

    catalog.beats = late
    clock.pass_by(LEASE_S + 1)
    for _ in range(3):
        with pytest.raises(Unavailable, match="may not be shard 3 any more"):
            membership.check()
    catalog.beats = catalog.counts_on_it
    wait_until(lambda: _answers(membership))


def test_who_was_replaced_answers_nothing_again(
    joined: Membership, catalog: SlowCatalog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "TEND_S", 0.01)
    catalog.beats = catalog.has_another
    clock.pass_by(LEASE_S + 1)
    with pytest.raises(Unavailable, match=r"not the shard any more .*epoch 1 is over"):
        joined.check()
    catalog.beats = catalog.counts_on_it
    catalog.asked.clear()
    # Clients are told to look elsewhere, and not that their run's epoch is over.
    with pytest.raises(Unavailable, match="not the shard any more"):
        joined.check()
    with pytest.raises(StaleEpoch, match="not the shard any more") as caught:
        joined.check_named(3, 1)
    assert caught.value.details["current"] == 2
    assert not joined.joined
    assert not catalog.asked.wait(1.0), "nor does it join again"


def test_who_is_stopped_says_so_and_answers_nothing(joined: Membership, catalog: SlowCatalog) -> None:
    joined.stop()
    assert catalog.left == [LeaveCluster(number=3, epoch=1, lock=LOCK)]
    with pytest.raises(Unavailable, match="is being stopped"):
        joined.check()


def test_a_beat_that_outlasts_its_process_s_leaving_changes_nothing(
    joined: Membership, catalog: SlowCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "STOP_S", 0.01)
    under_way, let_go, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> News:
        under_way.set()
        assert let_go.wait(WAIT_S)
        done.set()
        return catalog.counts_on_it()

    catalog.beats = slow
    assert under_way.wait(WAIT_S)
    joined.stop()
    assert len(catalog.left) == 1
    let_go.set()
    assert done.wait(WAIT_S)
    time.sleep(0.1)
    with pytest.raises(Unavailable, match="is being stopped"):
        joined.check()


def _answers(membership: Membership) -> bool:
    try:
        membership.check()
    except Unavailable:
        return False
    return True


# -- answers that are made while the process may be stopped ------------------------------------------


class Watch:
    """A process that is the shard until it is not."""

    def __init__(self) -> None:
        self.is_shard = True

    def check(self) -> None:
        if not self.is_shard:
            raise Unavailable("not the shard any more")

    def replace(self) -> None:
        self.is_shard = False


def test_what_was_made_before_a_stop_is_not_given_after_it() -> None:
    watch = Watch()
    with pytest.raises(Unavailable), held(watch.check):
        watch.replace()
    with pytest.raises(Unavailable), held(watch.check):
        pytest.fail("it was asked before anything is done")


def test_errors_of_a_process_that_was_replaced_do_not_count_either() -> None:
    """What it does not have is not lost: its successor may."""
    watch = Watch()
    with pytest.raises(ChunkLost), held(watch.check):
        raise ChunkLost("not here")
    with pytest.raises(Unavailable), held(watch.check):
        watch.replace()
        raise ChunkLost("not here")


def test_rows_have_no_end_and_no_error_of_a_process_that_was_replaced() -> None:
    watch = Watch()

    def blocks(ends: bool) -> Iterator[Rows]:
        yield Rows(np.full(1, 0), None)
        if not ends:
            watch.replace()

    assert len(list(held_rows(blocks(True), watch.check))) == 1
    stream = held_rows(blocks(False), watch.check)
    next(stream)
    with pytest.raises(Unavailable):
        next(stream)

    def broken() -> Iterator[Rows]:
        yield Rows(np.full(1, 0), None)
        watch.replace()
        raise ChunkLost("not here")

    watch.is_shard = True
    stream = held_rows(broken(), watch.check)
    next(stream)
    with pytest.raises(Unavailable):
        next(stream)


# -- what proves that another process has ended ------------------------------------------------------


def test_a_lock_is_that_of_one_directory(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    first = Directory.claim(here, None)
    known = first.lock_id()
    assert len(bytes.fromhex(known)) == 16
    shutil.copytree(here, there)
    copy = Directory.claim(there, None)
    assert copy.lock_id() != known
    first.release()
    # The same one, wherever it is now.
    here.rename(tmp_path / "moved")
    again = Directory.claim(tmp_path / "moved", None)
    assert again.lock_id() == known
    # A file in its place is another one, while somebody holds the first.
    (tmp_path / "moved" / "lock").unlink()
    other = Directory.claim(tmp_path / "moved", None)
    assert other.lock_id() != known
    for one in (copy, again, other):
        one.release()


def test_the_clock_of_a_lease_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {time.CLOCK_MONOTONIC: 3.0, time.CLOCK_BOOTTIME: 3000.0}
    monkeypatch.setattr(time, "clock_gettime", shown.__getitem__)
    assert clock_s() == 3000.0
