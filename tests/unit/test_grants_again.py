"""Granted files that come back: how soon, which first, and never to who still reads what was in them."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from arrow_tq.store import Engine, EngineConfig, grants
from arrow_tq.store.extent import Entry
from arrow_tq.store.recycling import Recycling
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.commands import OpenRun, TaskSpec
from tests.unit.test_grants import EXPERTS, MIB, Client, engine, experts, released

__all__ = ["engine"]


def test_a_released_file_comes_back_before_upkeep_looks(tmp_path: Path) -> None:
    config = EngineConfig(data_dir=tmp_path / "data", memory_dir=tmp_path / "memory", upkeep_period_s=600.0)
    engine = Engine(config)
    engine.execute(OpenRun(run="r", fields=[EXPERTS.to_json()], tasks=[TaskSpec(name="t")]))
    client, inode = released(engine)
    time.sleep(0.05)
    client.leave()
    wait_until(lambda: engine.stats()["recycled_bytes"] > 0, 2.0)
    assert engine.stats()["zombie_bytes"] == 0
    assert os.fstat(Client(engine).descriptor).st_ino == inode
    engine.close()


def test_a_little_that_was_not_used_stays_a_moment(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was filled to nine tenths; then its memory is needed, or the moment is over."""
    paths = []
    for seed in range(2):
        client = Client(engine)
        chunk = client.write(experts(9 * MIB // 80, seed))
        assert client.adopt(chunk) == [None]
        client.end()
        client.leave()
        paths.append(Path(client.told.path))
    engine._shard.maintain()
    assert [path.stat().st_size for path in paths] == [MIB, MIB]
    used = engine.stats()["used_bytes"]
    engine._shard.make_room()
    assert [path.stat().st_size < MIB for path in paths] == [True, True]
    assert engine.stats()["used_bytes"] < used
    monkeypatch.setattr(grants, "CUT_S", 0.0)
    client = Client(engine)
    assert client.adopt(client.write(experts(9 * MIB // 80, 3))) == [None]
    client.end()
    client.leave()
    engine._shard.maintain()
    assert Path(client.told.path).stat().st_size < MIB


def test_the_file_that_was_used_last_is_granted_first(engine: Engine) -> None:
    clients = [Client(engine) for _ in range(3)]
    inodes = [os.fstat(client.descriptor).st_ino for client in clients]
    for client in clients:
        client.end()
        client.leave()
        engine._shard.maintain()
    again = [os.fstat(Client(engine).descriptor).st_ino for _ in range(3)]
    assert again == inodes[::-1]


def test_a_slow_reader_never_gets_what_came_after_in_its_file(engine: Engine) -> None:
    """Its chunk is released, and the file is another grant's, between two messages of its answer."""
    client = Client(engine)
    chunk = client.write(experts())
    assert client.adopt(chunk) == [None]
    chunk_id = ChunkHeader.from_bytes(chunk.header.encode()).chunk_id
    shard = engine._shard
    entry = shard.source(chunk_id)
    assert isinstance(entry, Entry)
    assert np.array_equal(shard.part(chunk_id, entry, 10, 20), experts()[10:30])
    inode = os.fstat(client.descriptor).st_ino
    client.end()
    shard.drop([chunk_id])
    client.leave()
    shard.maintain()
    again = Client(engine)
    assert os.fstat(again.descriptor).st_ino == inode
    again.write(experts(100, 4))
    assert shard.part(chunk_id, entry, 10, 20) is None
    again.leave()


def held_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_memory_is_freed_from_under_a_mapping_that_nobody_views(engine: Engine) -> None:
    """What a client keeps mapped in case it comes back does not add to what the store may use."""
    client = Client(engine)
    client.memory[-1] = 7
    fcntl.flock(client.descriptor, fcntl.LOCK_UN)
    client.end()
    engine._shard.maintain()
    assert engine.stats()["recycled_bytes"] == MIB
    assert held_bytes(client.descriptor) == MIB
    engine._shard.make_room()
    assert held_bytes(client.descriptor) == 0
    client.leave()


@pytest.mark.parametrize("viewed", [False, True])
def test_what_an_earlier_process_kept_is_freed_unless_it_is_viewed(tmp_path: Path, viewed: bool) -> None:
    folder = tmp_path / "recycled"
    Recycling(folder, MIB, 60.0)
    path = folder / "000001"
    path.write_bytes(bytes(MIB))
    descriptor = os.open(path, os.O_RDWR)
    mapping = mmap.mmap(descriptor, MIB)
    if viewed:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    Recycling(folder, MIB, 60.0)
    assert not list(folder.iterdir())
    assert held_bytes(descriptor) == (MIB if viewed else 0)
    mapping.close()
    os.close(descriptor)
