"""A node's shard keeps other nodes' chunks for its readers: fetched once, bounded, dropped when released."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.calls import ask
from arrow_tq.interface import Store
from arrow_tq.store.cluster.node_cache import NodeCache
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.commands import GetStats, Stats
from arrow_tq_schemas.ids import ChunkId, IdFactory
from tests.cluster.test_cluster import read_of
from tests.clusters import Cluster
from tests.flight import wire

TOKENS = fields.token_ids()
IDS = IdFactory()

pytestmark = pytest.mark.slow


def chunk(rows: int = 10) -> tuple[ChunkId, Chunk]:
    made = wire.make_chunk(TOKENS, "r", np.arange(rows, dtype=np.int32))
    return made.header.chunk_id, made


class Source:
    """Where chunks are: counts who asks, and can be made to wait or fail."""

    def __init__(self, chunks: dict[ChunkId, Chunk]) -> None:
        self.chunks = chunks
        self.asked: list[ChunkId] = []
        self.go = threading.Event()
        self.go.set()
        self.error: errors.ArrowTQError | None = None

    def fetch(self, ids: Sequence[ChunkId]) -> list[Chunk | None]:
        self.asked += ids
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return [self.chunks.get(one) for one in ids]


def test_many_readers_fetch_a_chunk_once() -> None:
    source = Source(dict(chunk() for _ in range(3)))
    cache = NodeCache(1 << 20, source.fetch)
    ids = list(source.chunks)
    source.go.clear()
    found: list[dict[ChunkId, Chunk | None]] = []
    readers = [threading.Thread(target=lambda: found.append(cache.get(ids))) for _ in range(8)]
    for reader in readers:
        reader.start()
    while cache.counters()["cache_waits_total"] < 7 * 3:
        time.sleep(0.01)
    source.go.set()
    for reader in readers:
        reader.join(30)
    assert len(found) == 8 and all(one == source.chunks for one in found)
    assert sorted(source.asked) == sorted(ids)
    assert cache.get(ids) == source.chunks
    counters = cache.counters()
    assert (counters["cache_misses_total"], counters["cache_hits_total"]) == (3, 3)


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    (only, made) = chunk()
    source = Source({only: made})
    cache = NodeCache(1 << 20, source.fetch)
    source.go.clear()
    source.error = errors.Unavailable("gone", shard=2)
    caught: list[errors.ArrowTQError] = []

    def read() -> None:
        try:
            cache.get([only])
        except errors.ArrowTQError as error:
            caught.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    while cache.counters()["cache_waits_total"] < 3:
        time.sleep(0.01)
    source.go.set()
    for reader in readers:
        reader.join(30)
    assert [type(one) for one in caught] == [errors.Unavailable] * 4
    assert len({id(one) for one in caught}) == 4
    source.error = None
    assert cache.get([only]) == {only: made}


def test_what_was_not_used_for_longest_leaves_first_and_giants_pass_through() -> None:
    made = [chunk(10) for _ in range(4)]
    giant = chunk(1000)
    source = Source(dict([*made, giant]))
    cache = NodeCache(3 * 40, source.fetch)
    for one, _ in made[:3]:
        cache.get([one])
    cache.get([made[0][0]])
    cache.get([made[3][0]])
    assert cache.ids() == [made[2][0], made[0][0], made[3][0]]
    assert cache.get([giant[0]]) == dict([giant])
    counters = cache.counters()
    assert counters["cache_used_bytes"] == 120 and counters["cache_evicted_total"] == 1
    cache.drop([made[2][0], giant[0]])
    assert cache.counters()["cache_used_bytes"] == 80
    assert cache.get([IDS.next(1)]).popitem()[1] is None
    assert len(cache.ids()) == 2


# -- two nodes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes"), 2, "--set", "cache_bytes=100000", hosts=True) as running:
        yield running


@pytest.fixture
def store(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A client on the first node."""
    monkeypatch.setattr("arrow_tq.client.cluster.boot_id", lambda: "host-0")
    with arrow_tq.connect(nodes.url) as opened:
        yield opened


def counters(nodes: Cluster) -> dict[str, float]:
    """Of the first node's shard."""
    with arrow_tq.connect(nodes.shards[0].url) as shard:
        return ask(shard._backend, GetStats(), Stats).values


def write_far(nodes: Cluster, store: Store, run_name: str, rows: int = 500) -> np.ndarray:
    """A session of four steps on the second node."""
    run = store.run(run_name, fields=[TOKENS])
    tokens = np.random.default_rng(0).integers(0, 1000, 4 * rows, dtype=np.int32)
    session = run.session("s")
    session.pin_shard(nodes.number(1))
    for index in range(4):
        with session.step(id=str(index), sampled=(index * rows, (index + 1) * rows)) as step:
            step.put("token_ids", tokens[index * rows : (index + 1) * rows], start=index * rows)
    session.finalize()
    return tokens


def test_readers_of_a_node_fetch_far_chunks_once(nodes: Cluster, store: Store) -> None:
    tokens = write_far(nodes, store, "once")
    before = counters(nodes)
    run = store.run("once")
    batch = run.claim(10)

    def read() -> None:
        np.testing.assert_array_equal(batch.fetch(["token_ids"])["token_ids"][0], tokens)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    after = counters(nodes)
    grown = {name: after[name] - before[name] for name in before if name.startswith("cache_")}
    assert grown["cache_misses_total"] == 4
    assert grown["cache_hits_total"] + grown["cache_waits_total"] == 12
    assert grown["cache_used_bytes"] == tokens.nbytes
    # What is released is neither kept nor given.
    batch.release()
    with pytest.raises(errors.ChunkReleased):
        run.table(["s"], fields=["token_ids"])
    end = time.monotonic() + 20
    while counters(nodes)["cache_chunks"]:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_what_does_not_fit_is_read_all_the_same(nodes: Cluster, store: Store) -> None:
    tokens = write_far(nodes, store, "large", rows=20_000)
    table = store.run("large").table(["s"], fields=["token_ids"])
    np.testing.assert_array_equal(table["token_ids"][0].as_py(), tokens)
    assert counters(nodes)["cache_used_bytes"] <= 100_000


def test_an_open_step_is_pending_through_the_cache_too(nodes: Cluster, store: Store) -> None:
    run = store.run("open", fields=[TOKENS])
    session = run.session("s")
    session.pin_shard(nodes.number(1))
    step = session.step(id="1")
    receipt = step.put("token_ids", np.arange(5, dtype=np.int32), start=0)
    step.flush()
    with pytest.raises(errors.ChunkPending):
        list(run.backend.read(read_of(run, "token_ids", receipt.spans())))
    step.cancel()


def test_without_its_own_shard_a_node_reads_far_ones_directly(nodes: Cluster, store: Store) -> None:
    tokens = write_far(nodes, store, "direct")
    nodes.shards[0].kill()
    try:
        table = store.run("direct").table(["s"], fields=["token_ids"])
        np.testing.assert_array_equal(table["token_ids"][0].as_py(), tokens)
    finally:
        nodes.start_shard(0)
        nodes.wait()


def test_paths_are_taken_by_clients_of_a_node_alone(nodes: Cluster, tmp_path: Path) -> None:
    """A client on neither node reads where chunks are."""
    with arrow_tq.connect(nodes.url) as elsewhere:
        write_far(nodes, elsewhere, "elsewhere")
        before = counters(nodes)["cache_misses_total"]
        elsewhere.run("elsewhere").table(["s"], fields=["token_ids"])
        assert counters(nodes)["cache_misses_total"] == before
