"""The parts of a cluster by themselves: the news, the choice of a shard, reads put together."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq import errors, fields
from arrow_tq.backend import Read, Rows
from arrow_tq.client.pending import PendingPut
from arrow_tq.client.placement import STAY_BYTES, STAY_S, Placing, choose
from arrow_tq.client.shard_client import WatchedPut, after
from arrow_tq.client.shard_reads import Reader, no_such_shard, read_shards, shard_numbers, unreadable
from arrow_tq.store.cluster import outbox
from arrow_tq.store.cluster.outbox import Outbox
from arrow_tq_schemas.cluster import ClusterMap, ShardEntry, ShardServer
from arrow_tq_schemas.ids import ChunkId, IdFactory
from arrow_tq_schemas.spans import Span, to_spans

CATALOG = uuid.uuid4().hex
IDS = IdFactory()


def server(name: str = "a", host: str = "h") -> ShardServer:
    return ShardServer(url=f"grpc://{name}:1", host=host)


# -- the news ----------------------------------------------------------------------------------------


def ids_of(count: int) -> list[ChunkId]:
    return [IDS.next(1) for _ in range(count)]


def settle(box: Outbox) -> int:
    """What a shard does at first: it reconciles; gives the number that it goes on from."""
    first = box.take(1, CATALOG, 0)
    assert first.reconcile
    return first.last


def test_news_come_in_order_until_they_are_dealt_with() -> None:
    box = Outbox(CATALOG)
    attached, released = ids_of(3), ids_of(2)
    done = settle(box)
    box.add(1, "attached", attached)
    box.add(1, "released", released)
    for _ in range(2):
        news = box.take(1, CATALOG, done)
        assert news.attached == [one.hex for one in attached]
        assert news.released == [one.hex for one in released]
        assert not news.reconcile and not news.more
    assert box.take(1, CATALOG, news.last).released == []
    assert box.take(2, CATALOG, 0).reconcile


def test_what_a_shard_did_not_hear_is_asked_for() -> None:
    box = Outbox(CATALOG)
    box.add(1, "released", ids_of(1))
    first = box.take(1, uuid.uuid4().hex, 500)
    assert first.reconcile
    # The answer was lost on the way: its number counts for another catalog still.
    assert box.take(1, uuid.uuid4().hex, 500) == first
    rest = box.take(1, CATALOG, first.last)
    assert not rest.reconcile and rest.released == []
    box.joined(1)
    assert box.take(1, CATALOG, 0).reconcile


def test_too_many_news_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "KEPT_MAX", 10)
    monkeypatch.setattr(outbox, "NEWS_MAX", 4)
    box = Outbox(CATALOG)
    done = settle(box)
    for _ in range(3):
        box.add(1, "released", ids_of(3))
    seen = []
    while True:
        news = box.take(1, CATALOG, done)
        done = news.last
        seen.append(len(news.released))
        if not news.more:
            break
    assert seen == [3, 3, 3]
    for _ in range(5):
        box.add(1, "released", ids_of(3))
    assert box.take(1, CATALOG, done).reconcile


# -- placing -----------------------------------------------------------------------------------------


def entry(number: int, host: str, free: int) -> ShardEntry:
    return ShardEntry(
        number=number,
        epoch=1,
        servers=[server(host=host)],
        capacity_bytes=1000,
        used_bytes=1000 - free,
        up=True,
    )


@given(st.floats(0, 0.9999))
def test_chunks_stay_on_their_host_while_there_is_room(chance: float) -> None:
    shards = [entry(1, "far", 900), entry(2, "here", 10), entry(3, "here", 0)]
    assert choose(shards, "here", chance) == 2
    full = [entry(1, "far", 900), entry(2, "here", 0)]
    assert choose(full, "here", chance) == 1
    assert choose([entry(1, "far", 0), entry(2, "far", 0)], "here", chance) in (1, 2)


def test_the_more_room_the_likelier() -> None:
    shards = [entry(1, "a", 750), entry(2, "b", 250)]
    chances = np.linspace(0, 0.9999, 1000)
    share = np.mean([choose(shards, "c", float(chance)) == 1 for chance in chances])
    assert share == pytest.approx(0.75, abs=0.01)


def test_new_chunks_stay_together_for_a_moment_or_so_many_bytes() -> None:
    shards = [entry(number, "here", 500) for number in (1, 2, 3, 4)]
    known = ClusterMap(version=1, catalog=CATALOG, lease_s=1, shards=shards)
    placing = Placing("here")
    assert placing.present(known, 0.0) is None
    first = placing.next(shards, known, 0.0)
    assert placing.present(known, STAY_S / 2) == first
    assert placing.present(known, STAY_S) is None
    assert placing.present(known.model_copy(), STAY_S / 2) is None
    placing.add(STAY_BYTES)
    assert placing.present(known, STAY_S / 2) is None
    moments = [placing.next(shards, known, 0.0) for _ in range(40)]
    assert {moments.count(number) for number in (1, 2, 3, 4)} <= {9, 10, 11}


# -- reading -----------------------------------------------------------------------------------------


class Memory:
    """Shards whose chunk holds its own row numbers, some of which are down, and some on this machine."""

    def __init__(self, down: frozenset[int], block_rows: int, near: frozenset[int] = frozenset()) -> None:
        self._down = down
        self._block_rows = block_rows
        self._near = near

    def views(self, number: int, request: Read) -> Iterator[Rows] | None:
        if number not in self._near:
            return None
        parts = [np.arange(one["row"], one["row"] + one["rows"]) + 1000 * number for one in request.spans]
        return (Rows(part, None) for part in parts)

    def is_down(self, number: int) -> str | None:
        return f"grpc://{number}:1" if number in self._down else None

    def reader(self, number: int) -> Reader:
        return lambda request: self._rows(number, request)

    def _rows(self, number: int, request: Read) -> Iterator[Rows]:
        if number > 3:
            raise no_such_shard(number, request)
        if number in self._down:
            raise unreadable(number, f"grpc://{number}:1", request, "gone")
        parts = [np.arange(one["row"], one["row"] + one["rows"]) + 1000 * number for one in request.spans]
        joined = np.concatenate(parts)
        for first in range(0, len(joined), self._block_rows):
            yield Rows(joined[first : first + self._block_rows], None)


PIECES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=30
)


def request_of(pieces: list[tuple[int, int, int]], group: int = 0) -> Read:
    spans = [Span(0, IDS.next(shard), row, rows) for shard, row, rows in pieces]
    return Read("r", fields.token_ids(), group, None, to_spans(spans))


@given(PIECES, st.integers(1, 12), st.frozensets(st.integers(0, 3)))
@settings(max_examples=60, deadline=None)
def test_rows_of_many_shards_come_in_the_order_asked(
    pieces: list[tuple[int, int, int]], block_rows: int, near: frozenset[int]
) -> None:
    request = request_of(pieces)
    assert shard_numbers(request.spans).tolist() == [shard for shard, _, _ in pieces]
    shards = Memory(frozenset(), block_rows, near)
    found = np.concatenate([rows.values for rows in read_shards(shards, request)])
    wanted = np.concatenate([np.arange(row, row + rows) + 1000 * shard for shard, row, rows in pieces])
    np.testing.assert_array_equal(found, wanted)


@given(PIECES, st.integers(0, 300), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_read_goes_on_where_it_was_cut(
    pieces: list[tuple[int, int, int]], rows: int, block_rows: int
) -> None:
    request = request_of([(1, row, count) for _, row, count in pieces])
    wanted = np.concatenate([np.arange(row, row + count) + 1000 for _, row, count in pieces])
    seen = min(rows, len(wanted))
    rest = after(request, seen)
    assert int(rest.spans["rows"].sum()) == len(wanted) - seen
    if len(rest.spans):
        found = np.concatenate([one.values for one in read_shards(Memory(frozenset(), block_rows), rest)])
        np.testing.assert_array_equal(found, wanted[seen:])


def test_a_dead_shard_s_chunks_are_named_and_no_others() -> None:
    request = request_of([(1, 0, 2), (2, 0, 2), (1, 5, 1), (2, 9, 3)])
    chunks = [ChunkId(int(one["high"]) << 64 | int(one["low"])) for one in request.spans]
    with pytest.raises(errors.ChunkPending, match=r"shard 2 at grpc://2:1") as caught:
        list(read_shards(Memory(frozenset([2]), 4), request))
    assert caught.value.details["ids"] == [one.hex for one in chunks if one.shard == 2]
    assert caught.value.details["shard"] == 2
    with pytest.raises(errors.ChunkLost, match="there is no shard 9"):
        list(read_shards(Memory(frozenset(), 4), request_of([(1, 0, 2), (9, 0, 2)])))


class Up:
    """Implements ``Watcher``: every shard is up."""

    def __init__(self) -> None:
        self.suspects: list[int] = []

    def is_down(self, number: int) -> str | None:
        return None

    def suspect(self, number: int) -> None:
        self.suspects.append(number)


def test_a_put_whose_call_took_too_long_ends_with_that() -> None:
    handle = PendingPut(1, lambda: None)
    handle.settle(errors.DeadlineExceeded("adopt: no answer"))
    began, watcher = time.monotonic(), Up()
    with pytest.raises(errors.DeadlineExceeded, match="no answer"):
        WatchedPut(watcher, 1, handle).wait(None)
    assert time.monotonic() - began < 1 and not watcher.suspects


def test_a_shard_that_is_full_gets_nothing_for_a_while() -> None:
    handle, watcher = PendingPut(1, lambda: None), Up()
    handle.settle(errors.StoreFull("no room"))
    with pytest.raises(errors.StoreFull):
        WatchedPut(watcher, 3, handle).wait(None)
    assert watcher.suspects == [3]
