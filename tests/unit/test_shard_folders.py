"""Folders of what is gone: removed, made again, and never taken from under a writer."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import Field, fields
from arrow_tq.store.shard import Durability, Shard
from tests.chunking import config, equal, random_chunk, reopen_after_crash

ROWS = Field("rows", "int32", (4,))
OTHER = Field("other", "int64")


def folders(root: Path) -> set[str]:
    """Folders of runs and below, in either tier and of sidecars."""
    places = [
        *root.glob("memory/extents/**/"),
        *root.glob("data/extents/**/"),
        *root.glob("data/sidecars/*/**/"),
    ]
    tops = {root / "memory/extents", root / "data/extents", *root.glob("data/sidecars/*/")}
    return {str(place.relative_to(root)) for place in places if place not in tops}


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_finished_run_leaves_no_folder(tmp_path: Path, durability: Durability) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0))
    chunks = [
        random_chunk(field, 100, seed, run=run)
        for seed, (field, run) in enumerate([(ROWS, "one"), (OTHER, "one"), (ROWS, "two")])
    ]
    for chunk, field in zip(chunks, (ROWS, OTHER, ROWS), strict=True):
        shard.put(field, chunk, durability)
    tier = "memory" if durability == "process" else "data"
    assert f"{tier}/extents/one/other.0" in folders(tmp_path)
    before = folders(tmp_path)
    shard.drop([chunks[0].header.chunk_id])
    shard.maintain()
    assert {place for place in before if "one/rows" not in place} == folders(tmp_path)
    shard.drop([chunks[1].header.chunk_id])
    shard.maintain()
    assert folders(tmp_path) == {place for place in before if "two" in place}
    again = random_chunk(ROWS, 50, 7, run="one")
    shard.put(ROWS, again, durability)
    assert equal(shard.get(again.header.chunk_id), again)
    shard.close()
    other = Shard(config(tmp_path, seal_idle_s=0.0))
    assert equal(other.get(again.header.chunk_id), again)
    other.drop([one.header.chunk_id for one in (again, chunks[2])])
    other.maintain()
    assert folders(tmp_path) == set()
    other.close()


def test_what_an_earlier_process_left_is_found(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunk = random_chunk(ROWS, 10, 0)
    shard.put(ROWS, chunk, "process")
    (tmp_path / "memory/extents/gone/rows.0").mkdir(parents=True)
    (tmp_path / "data/sidecars/disk/gone/rows.0").mkdir(parents=True)
    kept = tmp_path / "memory/extents/somebody/elses.0"
    kept.mkdir(parents=True)
    (kept / "note").touch()
    other = reopen_after_crash(shard)
    other.maintain()
    assert not {place for place in folders(tmp_path) if "gone" in place}
    assert (kept / "note").exists()
    assert equal(other.get(chunk.header.chunk_id), chunk)
    other.close()


def test_folders_go_and_come_while_chunks_do(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0, extent_bytes=1 << 16, grow_bytes=1 << 14))
    failures: list[BaseException] = []
    done = threading.Event()

    def write(number: int) -> None:
        try:
            until, seed = time.monotonic() + 1.0, 0
            while time.monotonic() < until:
                chunk = random_chunk(ROWS, 50, seed, run=f"run-{number % 2}")
                shard.put(ROWS, chunk, "process" if number < 2 else "disk")
                assert equal(shard.get(chunk.header.chunk_id), chunk)
                shard.drop([chunk.header.chunk_id])
                seed += 1
        except BaseException as error:
            failures.append(error)

    def look_after() -> None:
        while not done.is_set():
            shard.maintain()

    upkeep = threading.Thread(target=look_after)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in (upkeep, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    upkeep.join()
    assert failures == []
    shard.maintain()
    assert folders(tmp_path) == set()
    shard.close()


def test_chunks_that_are_gone_are_counted_at_start(tmp_path: Path) -> None:
    with arrow_tq.open(tmp_path, capacity_bytes=1 << 28) as store:
        run = store.run(
            "r", fields=[fields.token_ids(), fields.routed_experts(4, 2, 8, layer_groups=[[0], [1, 2, 3]])]
        )
        for name in ("kept", "gone"):
            with run.session(name).step() as step:
                step.put("token_ids", [1, 2, 3], start=0)
                step.put("routed_experts", [[[1, 2]] * 4] * 2, start=0)
        run.session("gone").abort()
        assert (store.stats()["lost_chunks"], store.stats()["lost_bytes"]) == (0, 0)
    shutil.rmtree(tmp_path / "memory" / "extents" / "r" / "routed_experts.1")
    with arrow_tq.open(tmp_path) as store:
        # One of two layer groups of 16 bytes, which are counted as alike.
        assert (store.stats()["lost_chunks"], store.stats()["lost_bytes"]) == (1, 8)
