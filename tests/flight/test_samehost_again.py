"""Files that a writer filled come back to it: mapped still, and never under a view."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import arrow_tq
from arrow_tq.client.backend import FlightBackend
from arrow_tq.client.samehost import granted, mappings
from arrow_tq.client.samehost.kept import KEEP_BYTES, KeptFiles
from arrow_tq.client.samehost.writes import HostWrites
from arrow_tq.interface import Store
from arrow_tq.testing.scenes import wait_until
from tests.serving import Server
from tests.warm import WarmProcess

MIB = 1 << 20
ROUND_BYTES = 8 * MIB


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four chunks of a bundle each, from the first one on."""
    monkeypatch.setattr(granted, "GRANT_BYTES", (4 * MIB, 4 * MIB))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "data", tmp_path / "memory") as running:
        yield running


def writes(store: Store) -> HostWrites:
    backend = store._backend
    assert isinstance(backend, FlightBackend)
    return backend._link().writes


def kept(store: Store) -> KeptFiles:
    return writes(store).kept


def value(seed: int) -> npt.NDArray[np.uint8]:
    return np.full(ROUND_BYTES, seed, np.uint8)


def turn(store: Store, seed: int, reader: Store | None = None) -> None:
    """A bundle that is put, read and deleted."""
    ref = store.put_bundle({"x": value(seed)})
    got = (reader or store).get_bundle(ref)["x"]
    assert (got == seed).all()
    del got
    gc.collect()
    store.delete_bundle(ref)


def until_again(store: Store) -> None:
    """Take turns until a file came back."""
    before = kept(store).again
    for seed in range(40):
        turn(store, seed)
        time.sleep(0.02)
        if kept(store).again >= before + 3:
            return
    pytest.fail("no file came back while it was mapped")


def test_a_file_comes_back_to_the_mapping_that_is_there(own: Server) -> None:
    with arrow_tq.connect(own.url) as store, arrow_tq.connect(own.url) as reader:
        until_again(store)
        for seed in range(100, 110):
            turn(store, seed, reader)
            assert kept(store).kept_bytes <= KEEP_BYTES
        assert store.stats()["client_host_puts"] > 0
        assert reader.stats()["client_wire_reads"] == 0


def test_released_files_are_not_waited_for(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the writer that keeps them mapped nor by a reader that has them in its cache."""
    monkeypatch.setattr(mappings, "PERIOD_S", 600.0)
    with arrow_tq.connect(own.url) as store, arrow_tq.connect(own.url) as reader:
        for seed in range(6):
            turn(store, seed, reader)
        wait_until(lambda: kept(store).kept_bytes > 0, 5)
        wait_until(lambda: store.stats()["zombie_bytes"] == 0, 5)
        assert store.stats()["recycled_bytes"] > 0


def test_a_writer_that_rests_views_nothing(own: Server) -> None:
    """Not even what its threads told the server of last."""
    with arrow_tq.connect(own.url) as store:
        for seed in range(8):
            turn(store, seed)
            wait_until(lambda: store.stats()["zombie_bytes"] == 0, 4)


def test_a_reader_maps_a_file_that_comes_back_once(own: Server) -> None:
    """However often it is another extent, whose chunks are verified each time."""
    with arrow_tq.connect(own.url) as store, arrow_tq.connect(own.url) as reader:
        backend = reader._backend
        assert isinstance(backend, FlightBackend)
        for seed in range(12):
            turn(store, seed, reader)
            wait_until(lambda: store.stats()["zombie_bytes"] == 0, 5)
        mapped = backend._link().main.host._mappings._by_token.values()
        assert len({one.inode for one in mapped}) == len(mapped) < 12
        assert reader.stats()["client_wire_reads"] == 0


def test_a_large_bundle_is_verified_in_parts_at_a_time(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrow_tq.client.backend.copying_threads", lambda: 2)
    random = np.random.default_rng(0)
    rows = [random.integers(0, 256, size, np.uint8) for size in random.integers(0, 2 * MIB, 12)]
    with arrow_tq.connect(own.url) as store:
        ref = store.put_bundle({"rows": rows, "whole": value(9), "names": ["a", "b"]})
        before = store.stats()["client_host_reads"]
        got = store.get_bundle(ref)
        assert store.stats()["client_host_reads"] == before + 2
        assert all(np.array_equal(one, other) for one, other in zip(rows, got["rows"], strict=True))
        assert np.array_equal(got["whole"], value(9))
        assert got["names"] == ["a", "b"]


def test_what_is_viewed_is_not_written_over(own: Server) -> None:
    """A view of a chunk where its writer wrote it, after the chunk is released."""
    with arrow_tq.connect(own.url) as store:
        until_again(store)
        ((writer,),) = writes(store)._writers.values()
        refs = []
        current = None
        while current is None or current.appender.used_bytes < MIB:
            refs.append(store.put_bundle({"x": value(77)}))
            current = writer.current
        memory, end = current._memory, current.appender.used_bytes
        assert memory is not None
        view = memory[end - 1000 : end]
        del memory
        refs.append(store.put_bundle({"x": value(78)}))
        refs.append(store.put_bundle({"x": value(78)}))
        wait_until(lambda: current._memory is None, 5)
        for ref in refs:
            store.delete_bundle(ref)
        wait_until(lambda: store.stats()["zombie_bytes"] > 0, 5)
        before = view.copy()
        for seed in range(4):
            turn(store, seed)
        assert np.array_equal(view, before)
        assert store.stats()["zombie_bytes"] > 0
        del view, before
        wait_until(lambda: store.stats()["zombie_bytes"] == 0, 5)


def test_what_the_server_frees_is_free_at_once(tmp_path: Path) -> None:
    """Two runs that need each other's memory: what is mapped of one is not kept from the other."""
    flags = ("--set", f"capacity_bytes={64 * MIB}")
    freed = 0
    with (
        Server(tmp_path / "data", tmp_path / "memory", *flags) as own,
        arrow_tq.connect(own.url) as store,
        arrow_tq.connect(own.url) as reader,
    ):
        for seed in range(6):
            ref = store.put_bundle({"x": np.full(3 * ROUND_BYTES, seed, np.uint8)}, run=f"r{seed % 2}")
            for file in list(kept(store)._files.values()):
                if file.is_deleted():
                    freed += 1
                    assert os.fstat(file._descriptor).st_blocks == 0
            assert (reader.get_bundle(ref)["x"] == seed).all()
            gc.collect()
            store.delete_bundle(ref)
            wait_until(lambda: store.stats()["zombie_bytes"] == 0, 5)
        assert store.stats()["client_host_puts"] > 0
    assert freed


def test_an_idle_client_keeps_nothing(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with arrow_tq.connect(own.url) as store:
        for seed in range(5):
            turn(store, seed)
        wait_until(lambda: kept(store).kept_bytes > 0, 5)
        kept(store)._keep_s = 1.0
        wait_until(lambda: kept(store).kept_bytes == 0, 5)


def test_a_server_that_dies_takes_its_files_along(tmp_path: Path) -> None:
    """Those that were kept are deleted by the next one: they are unmapped, and what is written is right."""
    own = Server(tmp_path / "data", tmp_path / "memory")
    port = own.url.rpartition(":")[2]
    with own, arrow_tq.connect(own.url) as store:
        until_again(store)
        ref = store.put_bundle({"x": value(200)})
        wait_until(lambda: kept(store).kept_bytes > 0, 5)
        files = list(kept(store)._files.values())
        own.kill()
        with Server(tmp_path / "data", tmp_path / "memory", "--port", port):
            assert (store.get_bundle(ref)["x"] == 200).all()
            for seed in range(4):
                turn(store, seed)
            gone = [file for file in files if file.is_deleted()]
            wait_until(lambda: not any(file in gone for file in kept(store)._files.values()), 5)
            assert (store.get_bundle(ref)["x"] == 200).all()


CLIENT = """
import os, sys, time, numpy as np, arrow_tq
store = arrow_tq.connect(sys.argv[1])
kept = store._backend._link().writes.kept
for seed in range(60):
    ref = store.put_bundle({"x": np.full(8 << 20, seed, np.uint8)})
    store.delete_bundle(ref)
    time.sleep(0.02)
    if kept.again > 2 and kept.kept_bytes:
        break
assert kept.kept_bytes
os.kill(os.getpid(), 9)
"""


def test_a_client_dies_with_files_kept(own: Server) -> None:
    with WarmProcess("-c", CLIENT, own.url) as client:
        assert client.wait(60) == -signal.SIGKILL
    with arrow_tq.connect(own.url) as store:
        wait_until(lambda: store.stats()["zombie_bytes"] == 0, 5)
        until_again(store)


@pytest.mark.slow
def test_a_quota_has_room_for_what_follows(tmp_path: Path) -> None:
    """What a client keeps mapped counts nowhere, and takes nothing from a run's quota."""
    flags = ("--set", f"run_quota_bytes={96 * MIB}")
    with Server(tmp_path / "data", tmp_path / "memory", *flags) as own, arrow_tq.connect(own.url) as store:
        for seed in range(12):
            turn(store, seed)
        used, quota = 40 * MIB, 96 * MIB
        refs = [store.put_bundle({"x": value(seed)}) for seed in range(used // ROUND_BYTES)]
        assert store.stats()["used_bytes"] <= quota
        for seed, ref in enumerate(refs):
            assert (store.get_bundle(ref)["x"] == seed).all()
