"""Rows written where they stay: the same chunks as by the other way, and nothing of a put that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.interface import Store
from arrow_tq.producer.encode import Encoder
from arrow_tq.runs import Run
from arrow_tq.store import Engine
from arrow_tq.store.extent_key import ExtentKey

EXPERTS = fields.routed_experts(6, 4, 200)
GROUPED = Field(
    "grouped", "int16", shape=(6, 3), layer_axis=0, layer_groups=[[0, 1], [2, 3, 4], [5]], num_experts=300
)
ALL = [
    fields.token_ids(),
    fields.logprobs(),
    EXPERTS,
    GROUPED,
    Field("bf", "bfloat16"),
    Field("wide", "int64"),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


@pytest.fixture
def run(store: Store) -> Run:
    run = store.run("r", fields=ALL)
    run.chunk_bytes = 512
    return run


def engine(run: Run) -> Engine:
    assert isinstance(run.backend, Engine)
    return run.backend


def arrays() -> list[tuple[str, npt.NDArray[np.generic]]]:
    random = np.random.default_rng(5)
    experts = random.integers(0, 200, (90, 6, 4))
    holes = experts.astype(np.int32)
    holes[[3, 60]] = -1
    return [
        ("token_ids", np.arange(300, dtype=np.int32)),
        ("token_ids", np.arange(300, dtype=np.uint16)[::-1]),
        ("logprobs", random.standard_normal(200)),
        ("routed_experts", experts.astype(np.int32)),
        ("routed_experts", experts.astype(np.uint8)),
        ("routed_experts", experts.astype(">i8")),
        ("routed_experts", np.asfortranarray(experts.astype(np.int16))),
        ("routed_experts", holes),
        ("grouped", random.integers(0, 300, (77, 6, 3)).astype(np.int64)),
        ("bf", random.standard_normal(100).astype(np.float32)),
        ("wide", random.integers(-(1 << 60), 1 << 60, 50)),
        ("wide", np.zeros(0, np.int64)),
    ]


@pytest.mark.parametrize("index", range(len(arrays())))
def test_both_ways_store_the_same(run: Run, index: int) -> None:
    name, array = arrays()[index]
    field = run.field(name)
    encoder = Encoder(field, "r", run.epoch, run.chunk_bytes)
    expected = encoder.encode(array, 7, 0, run.ids)
    session = run.session("s")
    step = session.step()
    receipt = step.put(name, array, start=7)
    assert [one.model_dump(exclude={"id"}) for one in receipt.chunks] == [
        one.model_dump(exclude={"id"}) for one in expected.receipt.chunks
    ]
    shard = engine(run)._shard
    for number, one in enumerate(receipt.chunks):
        for group in range(one.groups):
            chunk = shard.get(one.chunk_id.sibling(group))
            wanted = expected.chunks_by_group[group][number]
            assert chunk is not None
            assert chunk.values.tobytes() == wanted.values.tobytes()
            assert (chunk.valid is None) == (wanted.valid is None)
            assert chunk.valid is None or np.array_equal(chunk.valid, wanted.valid)
            stored = shard.header(one.chunk_id.sibling(group))
            assert stored is not None
            assert (stored.start, stored.rows) == (wanted.header.start, wanted.header.rows)
    step.cancel()
    assert engine(run).stats()["chunks"] == 0


@pytest.mark.parametrize("index", [i for i, (_, array) in enumerate(arrays()) if array.dtype.isnative])
def test_pieces_are_placed_as_their_whole_is(run: Run, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrow_tq.producer.pieces.BLOCK_BYTES", 200)
    name, array = arrays()[index]
    shard = engine(run)._shard
    step = run.session("s").step()
    whole = step.put(name, array, start=0)
    cuts = sorted(np.random.default_rng(index).integers(0, len(array) + 1, 9).tolist())
    parts = step.put(name, np.split(array, cuts), start=len(array))
    assert [one.rows for one in parts.chunks] == [one.rows for one in whole.chunks]
    for one, other in zip(whole.chunks, parts.chunks, strict=True):
        for group in range(one.groups):
            wanted, got = shard.get(one.chunk_id.sibling(group)), shard.get(other.chunk_id.sibling(group))
            assert wanted is not None
            assert got is not None
            assert got.values.tobytes() == wanted.values.tobytes()
            assert (got.valid is None) == (wanted.valid is None)
    step.cancel()


def test_any_reader_of_streams_reads_an_extent(tmp_path: Path) -> None:
    experts = np.random.default_rng(0).integers(0, 200, (90, 6, 4)).astype(np.int32)
    with arrow_tq.open(tmp_path / "store") as store:
        run = store.run("r", fields=ALL)
        run.chunk_bytes = 512
        with run.session("s").step() as step:
            step.put("routed_experts", experts, start=0)
            step.put("token_ids", np.arange(90), start=0)
        run.session("s").finalize()
    (path,) = tmp_path.glob("store/memory/extents/r/routed_experts.0/*.arrows")
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    table.validate(full=True)
    assert np.array_equal(table.column(0).combine_chunks().to_numpy_ndarray(), experts)


@pytest.mark.parametrize("place", [0, 50, 89])
def test_a_value_out_of_range_leaves_nothing(run: Run, place: int) -> None:
    good = np.zeros((90, 6, 4), np.int32)
    bad = good.copy()
    bad[place, 1, 2] = 200
    shard = engine(run)._shard
    session = run.session("s")
    step = session.step()
    before = step.put("routed_experts", good[:7], start=0)
    live = shard._streams._by_key[ExtentKey("r", "routed_experts", 0, "memory")].live
    assert live is not None
    used = live.used_bytes
    with pytest.raises(errors.ValueOutOfRange, match=f"value 200 at position {place + 7}, index"):
        step.put("routed_experts", bad, start=7)
    assert engine(run).stats()["chunks"] == len(before.chunks)
    assert live.used_bytes == used, "its room is used again"
    after = step.put("routed_experts", good, start=7)
    assert {one.id for one in before.chunks}.isdisjoint(one.id for one in after.chunks)
    step.put("token_ids", np.arange(97), start=0)
    step.commit()
    session.finalize()
    assert not run.claim(1).fetch("routed_experts")["routed_experts"][0].any()


def test_a_group_that_fails_takes_its_siblings_along(run: Run) -> None:
    bad = np.zeros((40, 6, 3), np.int32)
    bad[39, 5, 0] = 300
    step = run.session("s").step()
    with pytest.raises(errors.ValueOutOfRange):
        step.put("grouped", bad, start=0)
    assert engine(run).stats()["chunks"] == 0
    good = step.put("grouped", bad % 300, start=0)
    assert engine(run).stats()["chunks"] == 3 * len(good.chunks)


def test_who_meets_another_writer_goes_the_other_way(run: Run) -> None:
    """With the stream taken by another thread, rows are converted meanwhile and appended after."""
    step = run.session("s").step()
    experts = np.random.default_rng(0).integers(0, 200, (20, 6, 4)).astype(np.int32)
    step.put("routed_experts", experts, start=0)
    stream = engine(run)._shard._streams._by_key[ExtentKey("r", "routed_experts", 0, "memory")]
    with stream.lock:
        writer = threading.Thread(target=lambda: step.put("routed_experts", experts, start=20))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive(), "it waits where it has to"
    writer.join(10)
    step.put("token_ids", np.arange(41), start=0)
    step.commit()
    run.session("s").finalize()
    got = run.claim(1).fetch("routed_experts")["routed_experts"][0]
    assert np.array_equal(got, np.concatenate([experts, experts]))


def test_many_writers_of_one_field(run: Run) -> None:
    random = np.random.default_rng(1)
    data = [random.integers(0, 200, (400, 6, 4)).astype(np.int32) for _ in range(6)]

    def write(index: int) -> None:
        session = run.session(f"s{index}")
        with session.step() as step:
            for first in range(0, 400, 50):
                step.put("routed_experts", data[index][first : first + 50], start=first)
            step.put("token_ids", np.arange(401), start=0)
        session.finalize()

    threads = [threading.Thread(target=write, args=(index,)) for index in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batch = run.claim(10, order_by="session_id")
    got = batch.fetch("routed_experts")["routed_experts"]
    for index, expected in enumerate(data):
        assert np.array_equal(got[index], expected)


def test_a_full_store_holds_nothing_of_a_put(tmp_path: Path) -> None:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=8 << 20) as store:
        run = store.run("r", fields=ALL)
        run.chunk_bytes = 1 << 20
        step = run.session("s").step()
        with pytest.raises(errors.StoreFull):
            step.put("routed_experts", np.zeros((1_000_000, 6, 4), np.uint8), start=0)
        assert engine(run).stats()["chunks"] == 0
        step.put("routed_experts", np.zeros((100_000, 6, 4), np.uint8), start=0)
        step.cancel()


KILLED = """
import os, sys, numpy as np, arrow_tq
from arrow_tq import fields, errors
store = arrow_tq.open(sys.argv[1], capacity_bytes=1 << 28)
run = store.run("r", fields=[fields.token_ids(), fields.routed_experts(6, 4, 200)])
run.chunk_bytes = 512
step = run.session("s").step()
good = np.zeros((90, 6, 4), np.int32)
step.put("routed_experts", good[:10], start=0)
bad = good.copy()
bad[-1, 0, 0] = 999
try:
    step.put("routed_experts", bad, start=10)
except errors.ValueOutOfRange:
    os.kill(os.getpid(), 9)
"""


def test_nothing_of_a_failed_put_comes_back_after_a_crash(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "store")], env=os.environ, timeout=60)
    assert done.returncode == -9
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 28) as store:
        assert store.stats()["chunks"] == 1
