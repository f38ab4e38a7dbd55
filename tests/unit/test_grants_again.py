"""Granted files that come back: how soon, which first, and never to who still reads what was in them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from arrow_tq.store import Engine, EngineConfig, grants
from arrow_tq.store.extent import Entry
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
