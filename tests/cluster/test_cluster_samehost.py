"""Shards on the client's machine: each is written to and read from as if it were the only server."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.calls import ask
from arrow_tq.client import ClientOptions
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import wait_until
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.commands import GetStats, Stats
from tests.cluster.test_cluster import read_of
from tests.clusters import Cluster

EXPERTS = fields.routed_experts(4, 2, 200)
GROUPED = Field(
    "grouped", "int16", shape=(6, 3), layer_axis=0, layer_groups=((0, 1), (2, 3, 4), (5,)), num_experts=300
)
FIELDS = [fields.token_ids(), EXPERTS, GROUPED]
WIRE = ClientOptions(same_host=False)
TOKENS = 3000
NAMES = itertools.count()


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    with arrow_tq.connect(cluster.url) as opened:
        yield opened


@pytest.fixture
def run(store: Store) -> Run:
    run = store.run(f"same-host-{next(NAMES)}", fields=FIELDS)
    run.chunk_bytes = 4096
    return run


def experts(seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 200, (TOKENS, 4, 2)).astype(np.int32)


def grouped(seed: int) -> npt.NDArray[np.int16]:
    return np.random.default_rng([seed, 1]).integers(0, 300, (TOKENS + 1, 6, 3)).astype(np.int16)


def write(run: Run, seed: int, shard: int | None = None) -> None:
    session = run.session(f"s-{seed:02}")
    if shard is not None:
        session.pin_shard(shard)
    with session.step() as step:
        step.put("token_ids", np.arange(TOKENS + 1) + seed, start=0)
        step.put("routed_experts", experts(seed), start=0)
        step.put("grouped", grouped(seed), start=0)
    session.finalize()


def check(batch: Batch, seeds: list[int]) -> None:
    data = batch.fetch(["token_ids", "routed_experts", "grouped"])
    for index, name in enumerate(batch.table["session_id"].to_pylist()):
        seed = int(name.split("-")[1])
        np.testing.assert_array_equal(data["token_ids"][index], np.arange(TOKENS + 1) + seed)
        np.testing.assert_array_equal(data["routed_experts"][index], experts(seed))
        np.testing.assert_array_equal(data["grouped"][index], grouped(seed))
    assert len(batch.table) == len(seeds)


def figures(cluster: Cluster, index: int) -> dict[str, float]:
    """What one shard counts itself."""
    with arrow_tq.connect(cluster.shards[index].url) as shard:
        return ask(shard._backend, GetStats(), Stats).values


def test_every_shard_is_written_and_read_without_the_wire(cluster: Cluster, store: Store, run: Run) -> None:
    before = [figures(cluster, index) for index in range(3)]
    seeds = list(range(12))
    for seed in seeds:
        write(run, seed, shard=1 + seed % 3)
    stats = store.stats()
    after = [figures(cluster, index) for index in range(3)]
    adopted = [
        late["chunks_adopted_total"] - early["chunks_adopted_total"]
        for early, late in zip(before, after, strict=True)
    ]
    assert min(adopted) > 0 and sum(adopted) == stats["client_host_puts"] > 3 * 12 * 5
    batch = run.claim(100)
    check(batch, seeds)
    stats = store.stats()
    assert stats["client_host_reads"] > 0 and stats["client_wire_reads"] == 0
    assert stats["client_host_mapped_extents"] >= 9, "of three shards and three fields"
    with arrow_tq.connect(cluster.url, options=WIRE) as wired:
        attached = wired.run(run.name).attach(batch.ref, 0, 1)
        check(attached, seeds)
        stats = wired.stats()
        assert stats["client_host_reads"] == 0 and stats["client_wire_reads"] > 0
        attached.release()


def test_what_just_committed_is_read_at_once(store: Store, run: Run) -> None:
    """The shards have not heard of the commit yet."""
    for seed in range(5):
        session = run.session(f"s-{seed:02}")
        with session.step() as step:
            receipt = step.put("token_ids", np.arange(100) + seed, start=0)
        (rows,) = run.backend.read(read_of(run, "token_ids", receipt.spans()))
        np.testing.assert_array_equal(rows.values, np.arange(100) + seed)
    assert store.stats()["client_wire_reads"] == 0


def test_a_value_out_of_range_leaves_nothing_on_a_shard(cluster: Cluster, store: Store, run: Run) -> None:
    bad = experts(0)
    bad[-1, 0, 0] = 200
    before = store.stats()["chunks"]
    step = run.session("s-bad").step()
    with pytest.raises(errors.ValueOutOfRange, match="position 2999"):
        step.put("routed_experts", bad, start=0)
    assert store.stats()["client_host_puts"] > 0
    assert store.stats()["chunks"] == before
    step.cancel()


def test_what_was_released_is_let_go(store: Store, run: Run) -> None:
    write(run, 1)
    batch = run.claim(1)
    check(batch, [1])
    batch.release()
    with pytest.raises(errors.ChunkReleased):
        run.table(["s-01"], fields=["token_ids"])
    run.session("s-02")
    wait_until(lambda: store.stats()["client_host_mapped_extents"] == 0, 40)


def test_an_epoch_that_advanced_is_known_to_every_shard(cluster: Cluster, store: Store, run: Run) -> None:
    write(run, 1)
    with arrow_tq.connect(cluster.url) as other:
        later = other.run(run.name, epoch=1)
        later.chunk_bytes = 4096
        write(later, 2)
        assert other.stats()["client_host_puts"] > 0
        check(later.claim(2), [1, 2])
    with pytest.raises(errors.StaleEpoch):
        write(run, 3)


def test_shards_that_say_they_are_elsewhere_are_reached_by_wire(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, hosts=True) as apart, arrow_tq.connect(apart.url) as store:
        run = store.run("r", fields=FIELDS)
        for seed in range(4):
            write(run, seed)
        check(run.claim(10), list(range(4)))
        stats = store.stats()
        assert stats["client_host_puts"] == stats["client_host_reads"] == 0
        assert stats["client_wire_reads"] > 0


def test_a_shard_that_stands_still_costs_no_more_than_by_wire(tmp_path: Path) -> None:
    """Neither asking for its memory nor waiting for what was written there takes longer than its lease."""
    with Cluster(tmp_path, 2) as pair, arrow_tq.connect(pair.url) as store:
        run = store.run("r", fields=FIELDS)
        number = pair.number(0)
        write(run, 1, shard=number)
        assert store.stats()["client_host_puts"] > 0
        pair.shards[0].process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(errors.Unreachable, match=f"shard {number} "):
            write(run, 2, shard=number)
        with pytest.raises(errors.ChunkPending):
            run.table(["s-01"], fields=["token_ids"])
        with arrow_tq.connect(pair.url) as late, pytest.raises(errors.Unreachable):
            # A client that never asked for its proof.
            write(late.run("r"), 3, shard=number)
        assert time.monotonic() - began < 45
        write(run, 4)
        pair.shards[0].process.send_signal(signal.SIGCONT)
        pair.wait()
        check(run.claim(10), [1, 4])


def test_a_shard_that_was_killed_is_written_in_place_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2) as pair, arrow_tq.connect(pair.url) as store:
        run = store.run("r", fields=FIELDS)
        number = pair.number(0)
        write(run, 1, shard=number)
        pair.shards[0].kill()
        pair.shards[0].__exit__(None, None, None)
        pair.start_shard(0)
        pair.wait()
        before = store.stats()["client_host_puts"]
        wait_until(lambda: _writes(run, 2, number), 30)
        assert store.stats()["client_host_puts"] > before > 0, "what was counted stays counted"
        check(run.claim(10), [1, 2])
        assert store.stats()["client_wire_reads"] == 0


def _writes(run: Run, seed: int, number: int) -> bool:
    try:
        write(run, seed, shard=number)
    except errors.Unavailable:
        return False
    return True
