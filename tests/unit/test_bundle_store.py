"""Bundles in an embedded store: where they lie, how long, and within which bounds."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.backend import written
from arrow_tq.interface import Store
from arrow_tq.sql import SqlLimits
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.testing.bundles import same, train_dict
from arrow_tq_schemas.commands import RunInfo

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


def open_with(path: Path, **settings: object) -> Store:
    return Store(Engine(EngineConfig(data_dir=path, **settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_bundles_survive_a_restart_and_extents_are_arrow_streams(tmp_path: Path, durability: str) -> None:
    value = train_dict(200)
    with arrow_tq.open(tmp_path / "s") as store:
        store.run("r", fields=[fields.token_ids()], durability=durability)  # type: ignore[arg-type]
        ref = store.put_bundle(value, run="r")
        gone = store.put_bundle(value, run="r")
        store.delete_bundle(gone)
    streams = list((tmp_path / "s").rglob("_bundle.0/*.arrows"))
    assert streams
    with pa.OSFile(str(streams[0])) as file:
        table = pa.ipc.open_stream(file).read_all()
    table.validate(full=True)
    assert table.column_names == ["_bundle"]
    with arrow_tq.open(tmp_path / "s") as store:
        same(value, store.get_bundle(ref))
        with pytest.raises(errors.NotFound):
            store.get_bundle(gone)
        again = store.put_bundle(value, run="r")
        same(value, store.get_bundle(again))


def test_rows_are_views_of_the_extent_and_keep_it(store: Store) -> None:
    value = {"x": [np.arange(1000) + index for index in range(64)], "n": [1] * 64}
    ref = store.put_bundle(value)
    got = store.get_bundle(ref)
    row = got["x"][5]
    store.delete_bundle(ref)
    del got
    gc.collect()
    assert store.stats()["bundle_leases"] == 1
    with pytest.raises(errors.DeadlineExceeded):
        store.delete_bundle(ref, wait_s=0.05)
    for _ in range(3):
        # Its memory must not be given to these.
        store.delete_bundle(store.put_bundle({"y": np.zeros(1 << 20)}))
    np.testing.assert_array_equal(row, value["x"][5])
    del row
    store.delete_bundle(ref, wait_s=10)
    assert store.stats()["chunks"] == 0


def test_lists_alone_hold_no_lease(store: Store) -> None:
    ref = store.put_bundle({"x": [[1, 2], [3]], "s": ["a", "b"]})
    got = store.get_bundle(ref)
    gc.collect()
    assert store.stats()["bundle_leases"] == 0
    assert got == {"x": [[1, 2], [3]], "s": ["a", "b"]}


def test_large_columns_are_cut_into_chunks(store: Store) -> None:
    value = {"x": [np.full(3 * MIB, index, np.uint8) for index in range(40)], "big": np.arange(9 * MIB)}
    ref = store.put_bundle(value)
    (row,) = store.sql("SELECT chunks, bytes FROM bundles").to_pylist()
    assert row["chunks"] > 5
    assert row["bytes"] / row["chunks"] < 64 * MIB
    same(value, store.get_bundle(ref))
    store.delete_bundle(ref)


def test_a_quota_bounds_one_run_and_names_what_is_used(tmp_path: Path) -> None:
    settings = {"capacity_bytes": 512 * MIB, "run_quota_bytes": 32 * MIB, "run_quotas": {"big": 128 * MIB}}
    with open_with(tmp_path / "s", **settings) as store:
        value = {"x": np.zeros(12 * MIB, np.uint8)}
        kept = [store.put_bundle(value, run="small") for _ in range(2)]
        with pytest.raises(errors.QuotaExceeded, match="'small'") as caught:
            store.put_bundle(value, run="small")
        details = caught.value.details
        assert details["quota_bytes"] == 32 * MIB
        assert 24 * MIB <= int(str(details["used_bytes"])) <= 32 * MIB
        assert isinstance(caught.value, errors.StoreFull) and caught.value.retryable
        # Nothing of it is left, and others go on.
        assert store.sql("SELECT run, count(*) AS n FROM bundles GROUP BY 1").to_pylist() == [
            {"run": "small", "n": 2}
        ]
        for _ in range(5):
            store.put_bundle(value, run="big")
        stats = store.stats()
        assert stats['run_quota_bytes{run="small"}'] == 32 * MIB
        assert stats['run_used_bytes{run="small"}'] <= 32 * MIB < stats['run_used_bytes{run="big"}']
        for ref in kept:
            same(value, store.get_bundle(ref))
            store.delete_bundle(ref, wait_s=10)
        store.delete_bundle(store.put_bundle(value, run="small"))


def test_a_quota_holds_for_trajectories_too(tmp_path: Path) -> None:
    with open_with(tmp_path / "s", capacity_bytes=256 * MIB, run_quota_bytes=8 * MIB) as store:
        run = store.run("r", fields=[fields.token_ids()])
        with pytest.raises(errors.QuotaExceeded), run.session("s").step() as step:
            step.put("token_ids", np.zeros(4 * MIB, np.int32), start=0)
        other = store.run("other", fields=[fields.token_ids()])
        with other.session("s").step() as step:
            step.put("token_ids", np.zeros(MIB, np.int32), start=0)


def test_a_quota_counts_what_an_earlier_process_left(tmp_path: Path) -> None:
    settings = {"capacity_bytes": 256 * MIB, "run_quota_bytes": 16 * MIB}
    value = {"x": np.zeros(10 * MIB, np.uint8)}
    with open_with(tmp_path / "s", **settings) as store:
        store.put_bundle(value)
    with open_with(tmp_path / "s", **settings) as store, pytest.raises(errors.QuotaExceeded):
        store.put_bundle(value)


def test_a_share_of_the_memory_bounds_the_capacity(tmp_path: Path) -> None:
    import psutil

    with open_with(tmp_path / "s", capacity_bytes=1 << 50, memory_share=0.001) as store:
        assert store.pressure().capacity_bytes == int(0.001 * psutil.virtual_memory().total)
    with pytest.raises(errors.InvalidInput, match="memory_share"):
        EngineConfig(data_dir=tmp_path, memory_share=2)
    with pytest.raises(errors.InvalidInput, match="run_quota"):
        EngineConfig(data_dir=tmp_path, run_quota_bytes=0)


def test_a_full_store_refuses_a_bundle_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    with arrow_tq.open(tmp_path / "s", capacity_bytes=64 * MIB) as store:
        with pytest.raises(errors.StoreFull):
            store.put_bundle({"x": np.zeros(100 * MIB, np.uint8)})
        stats = store.stats()
        assert stats["chunks"] == 0
        store.put_bundle({"x": np.zeros(20 * MIB, np.uint8)})


def test_half_a_bundle_is_never_seen_and_is_reaped(tmp_path: Path) -> None:
    class Broken(dict):  # type: ignore[type-arg]
        pass

    with open_with(tmp_path / "s", orphan_ttl_s=0.2, upkeep_period_s=0.05) as store:
        backend = store._backend
        info = store.run("default", fields=[fields.token_ids()])
        from arrow_tq.calls import ask
        from arrow_tq_schemas.commands import OpenBundleRun, RunInfo

        writer = backend.bundle_writer(ask(backend, OpenBundleRun(run=info.name), RunInfo))
        writer.write(0, 8, lambda out: written(out, np.ones(8, np.uint8)))
        with pytest.raises(errors.NotFound):
            store.get_bundle(f"atq-bundle:default:{writer.bundle_id}")
        until = time.monotonic() + 10
        while store.stats()["chunks"] and time.monotonic() < until:
            time.sleep(0.05)
        assert store.stats()["orphans_reaped_total"] == 1
        with pytest.raises(errors.InvalidInput, match="expected a dict"):
            store.put_bundle(Broken(x=1))


def test_a_chunk_of_another_run_publishes_nothing(store: Store) -> None:
    from arrow_tq.calls import ask
    from arrow_tq_schemas.commands import CommitBundle, Done

    ref = store.put_bundle({"x": [1]}, run="mine")
    store.put_bundle({"x": [1]}, run="theirs")
    for run in ("theirs", "mine"):
        command = CommitBundle(
            run=run, epoch=0, bundle_id=ref.bundle_id, chunks=2, rows=1, bytes=9, fields=[]
        )
        with pytest.raises((errors.ChunkLost, errors.Conflict)):
            ask(store._backend, command, Done)
    missing = CommitBundle(run="mine", epoch=0, bundle_id=ref.bundle_id, chunks=9, rows=1, bytes=9, fields=[])
    with pytest.raises(errors.ChunkLost, match="chunk 2 of 9"):
        ask(store._backend, missing, Done)
    assert store.get_bundle(ref) == {"x": [1]}


def test_a_writer_of_an_old_epoch_publishes_nothing(store: Store) -> None:
    old = store.run("r", fields=[fields.token_ids()])
    info = RunInfo(run="r", fields=[], tasks=[], durability="process", epoch=old.epoch)
    store.run("r", epoch=1)
    store.put_bundle({"x": [1]}, run="r")
    store._bundles.joined(info)
    with pytest.raises(errors.StaleEpoch):
        store.put_bundle({"x": [1]}, run="r")
    assert store.sql("SELECT count(*) AS n FROM bundles").column("n").to_pylist() == [1]


def test_sql_finds_bundles_by_words_not_by_text(store: Store) -> None:
    ref = store.put_bundle({"x": [1, 2, 3], "wide": [[1], [2], [3]], "z": ["a", "b", "c"]})
    call = f"bundle('{ref}')"
    assert store.sql(f"SELECT COUNT(*) AS n FROM {call}").to_pylist() == [{"n": 3}]
    assert store.sql(f"SELECT x * 2 AS v FROM {call} LIMIT 1").to_pylist() == [{"v": 2}]
    assert store.sql(f"SELECT b.* FROM {call} b LIMIT 1").column_names == ["x", "wide", "z"]
    assert store.sql(f"SELECT COLUMNS('x|z') FROM {call}").column_names == ["x", "z"]
    assert "x" in str(store.sql(f"EXPLAIN SELECT x FROM {call}").to_pylist())
    twice = f"SELECT a.x FROM {call} a JOIN BUNDLE ( '{ref.bundle_id}' ) b USING (z) -- {call}"
    assert store.sql(twice).num_rows == 3
    for text, error in (
        ("SELECT * FROM bundle('nope')", errors.InvalidQuery),
        ("SELECT * FROM bundle(x)", errors.InvalidQuery),
        ("SELECT x FROM bundle('atq-bundle:default:0197a0b1c2d382a58015555555555555')", errors.NotFound),
        ("SELECT x FROM bundle('0197a0b1c2d382a58015555555555555')", errors.NotFound),
        (f"SELECT bundle('{ref}')", errors.InvalidQuery),
    ):
        with pytest.raises(error):
            store.sql(text)


def test_sql_is_lent_no_more_than_fits(tmp_path: Path) -> None:
    with open_with(tmp_path / "s", sql=SqlLimits(memory_bytes=64 * MIB)) as store:
        ref = store.put_bundle({"x": [np.zeros(MIB)] * 8, "n": [1] * 8})
        with pytest.raises(errors.InvalidQuery, match="name fewer"):
            store.sql(f"SELECT len(x) FROM bundle('{ref}')")
        assert store.sql(f"SELECT sum(n) AS n FROM bundle('{ref}')").num_rows == 1


def test_a_damaged_bundle_is_lost_not_wrong(tmp_path: Path) -> None:
    with arrow_tq.open(tmp_path / "s") as store:
        ref = store.put_bundle({"x": np.arange(1 << 16)})
    (extent,) = (tmp_path / "s").rglob("_bundle.0/*.arrows")
    raw = bytearray(extent.read_bytes())
    place = raw.find(np.arange(30000, 30008).tobytes())
    raw[place] ^= 1
    extent.write_bytes(raw)
    with arrow_tq.open(tmp_path / "s") as store:
        with pytest.raises(errors.ChunkLost):
            store.get_bundle(ref)
        assert store.stats()["corrupt_chunks_total"] == 1


def test_many_threads_put_and_get(store: Store) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(4):
                value = train_dict(20, seed=number * 10 + turn, lists=bool(turn % 2))
                ref = store.put_bundle(value, run=f"run-{number % 2}")
                same(value, store.get_bundle(ref))
                store.delete_bundle(ref)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


PEAK = """
import resource, sys, numpy as np, arrow_tq
from pathlib import Path
rows, row_bytes, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def rss(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
value = {"x": [np.full(row_bytes, i % 251, np.uint8) for i in range(rows)], "t": [i for i in range(rows)]}
if where.startswith("grpc"):
    store = arrow_tq.connect(where)
else:
    store = arrow_tq.open(where)
store.put_bundle({"x": [np.zeros(1 << 16, np.uint8)] * 4})
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = rss("RssAnon")
ref = store.put_bundle(value)
peak_shared = rss("RssShmem") + rss("RssFile")
print(rss("VmHWM") - before - (0 if where.startswith("grpc") else peak_shared), ref)
"""


def added_bytes(rows: int, row_bytes: int, where: str) -> int:
    """What a put of that many bytes adds to the producer's own memory at its peak."""
    arguments = [sys.executable, "-c", PEAK, str(rows), str(row_bytes), where]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_a_put_adds_little_to_the_producer(tmp_path: Path) -> None:
    assert added_bytes(200, MIB, str(tmp_path / "s")) < 64 * MIB


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_large_put_adds_little_to_the_producer(tmp_path: Path) -> None:
    assert added_bytes(1024, MIB, str(tmp_path / "s")) < 128 * MIB
