"""The shard where threads, forks and failing devices meet it: nothing is lost twice, or kept for ever."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from arrow_tq import Field, errors
from arrow_tq.store import sidecar
from arrow_tq.store.shard import Shard
from tests.chunking import config, equal, random_chunk

ROWS = Field("rows", "int32", (4,))
OTHER = Field("other", "int64")


def in_fork(work: Callable[[], None]) -> int:
    """Exit status of a fork that does ``work``: 0, or 1 where it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fail_once(monkeypatch: pytest.MonkeyPatch, module: object, name: str, code: int) -> list[int]:
    """Make a function raise ``OSError(code)`` at its next call; the list counts the calls."""
    real, calls = getattr(module, name), []

    def wrapped(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapped)
    return calls


def test_dropping_while_the_extent_is_sealed_frees_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(config(tmp_path, extent_bytes=1 << 20, seal_idle_s=0.0))
    first, second = random_chunk(ROWS, 30_000, 1), random_chunk(ROWS, 60_000, 2)
    shard.put(ROWS, first, "process")
    write = sidecar.write

    def drop_meanwhile(*args: object) -> None:
        shard.drop([first.header.chunk_id])
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sidecar, "write", drop_meanwhile)
    shard.put(ROWS, second, "process")
    monkeypatch.undo()
    shard.maintain()
    shard.drop([second.header.chunk_id])
    shard.maintain()
    assert shard.usage().used_bytes == shard.usage().zombie_bytes == shard.usage().extents == 0
    assert list(tmp_path.rglob("*.arrows")) == list(tmp_path.rglob("*.idx")) == []
    shard.close()


def test_readers_meet_drops_without_errors(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0))
    current = [random_chunk(ROWS, 10, 0)]
    done, failures = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            chunk = current[0]
            try:
                got = shard.get(chunk.header.chunk_id)
                assert got is None or equal(got, chunk)
            except BaseException as error:
                failures.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for seed in range(25):
        current[0] = random_chunk(ROWS, 10, seed)
        shard.put(ROWS, current[0], "process")
        shard.drop([current[0].header.chunk_id])
        shard.maintain()
    done.set()
    for reader in readers:
        reader.join()
    shard.maintain()
    assert failures == []
    assert shard.usage().used_bytes == 0
    shard.close()


def test_an_entry_looked_up_before_its_drop_reads_as_gone(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0))
    chunk = random_chunk(ROWS, 10, 1)
    chunk_id = chunk.header.chunk_id
    shard.put(ROWS, chunk, "process")
    entry = shard.index.entries[chunk_id]
    shard.drop([chunk_id])
    shard.maintain()
    shard.index.entries[chunk_id] = entry
    assert shard.get(chunk_id) is None
    del shard.index.entries[chunk_id]
    shard.close()


def test_an_entry_of_a_file_that_another_extent_took_over_reads_as_gone(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0, recycle_bytes=64 << 20))
    first, second = random_chunk(ROWS, 1000, 1), random_chunk(ROWS, 1000, 2)
    shard.put(ROWS, first, "process")
    entry = shard.index.entries[first.header.chunk_id]
    shard.drop([first.header.chunk_id])
    shard.maintain()
    shard.put(ROWS, second, "process")
    assert shard.index.entries[second.header.chunk_id].extent.file is entry.extent.file
    shard.index.entries[first.header.chunk_id] = entry
    assert shard.get(first.header.chunk_id) is None
    del shard.index.entries[first.header.chunk_id]
    shard.close()


def test_memory_made_ready_while_an_extent_is_sealed_is_not_kept(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    shard.put(ROWS, random_chunk(ROWS, 1000, 1), "process")
    (extent,) = shard.index.extents
    shard.close()
    extent.file.grow(64 << 20, 4 << 20)
    assert extent.file.path.stat().st_size < 64 << 10


def test_nobody_can_write_through_what_was_read(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunk = random_chunk(ROWS, 10, 1)
    shard.put(ROWS, chunk, "process")
    got = shard.get(chunk.header.chunk_id)
    assert got is not None
    for array in (got.values, got.values.base):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True  # type: ignore[union-attr]
    shard.close()


def test_a_damaged_chunk_that_comes_again_is_stored_again(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0))
    chunk = random_chunk(ROWS, 1000, 1)
    chunk_id = chunk.header.chunk_id
    shard.put(ROWS, chunk, "process")
    shard.close()
    (path,) = tmp_path.rglob("*.arrows")
    content = bytearray(path.read_bytes())
    content[content.index(chunk.values.tobytes()) + 5] ^= 1
    path.write_bytes(content)
    again = Shard(shard.config)
    assert again.pin([chunk_id]) == []
    assert again.get(chunk_id) is None
    assert again.header(chunk_id) is None
    assert again.pin([chunk_id]) == [chunk_id]
    assert again.usage().corrupt_chunks == 1
    assert again.put(ROWS, chunk, "process")
    assert equal(again.get(chunk_id), chunk)
    assert again.is_pinned(chunk_id), "its step committed before the damage was seen"
    again.maintain()
    assert not path.exists(), "the damaged copy was all that its extent held"
    again.close()


def test_a_closed_shard_refuses_and_closes_again(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    shard.put(ROWS, random_chunk(ROWS, 10, 1), "process")
    shard.close()
    shard.close()
    chunk = random_chunk(ROWS, 10, 2)
    with pytest.raises(errors.Conflict, match=f"{chunk.header.id}.*closed"):
        shard.put(ROWS, chunk, "process")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_can_neither_write_nor_seal(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    first, second = random_chunk(ROWS, 1000, 1), random_chunk(ROWS, 1000, 2)
    shard.put(ROWS, first, "process")
    (path,) = tmp_path.rglob("*.arrows")
    size = path.stat().st_size

    def misuse() -> None:
        with pytest.raises(errors.StoreInUse, match="fork"):
            shard.put(ROWS, second, "process")
        shard.close()

    assert in_fork(misuse) == 0
    assert path.stat().st_size == size, "sealing truncates what the parent goes on to write"
    assert shard.put(ROWS, second, "process")
    assert equal(shard.get(second.header.chunk_id), second)
    shard.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_bytes_count_while_a_fork_maps_them(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0))
    chunk = random_chunk(ROWS, 1000, 1)
    shard.put(ROWS, chunk, "process")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    shard.drop([chunk.header.chunk_id])
    shard.maintain()
    assert shard.usage().zombie_bytes > 0
    os.close(write_end)
    os.waitpid(pid, 0)
    os.close(read_end)
    shard.maintain()
    assert shard.usage().used_bytes == 0
    shard.close()


def test_a_memory_directory_belongs_to_one_store(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunk = random_chunk(ROWS, 1000, 1)
    shard.put(ROWS, chunk, "process")
    with pytest.raises(errors.StoreInUse, match=f"belongs to the store at '{tmp_path / 'data'}'"):
        Shard(replace(shard.config, data_dir=tmp_path / "second"))
    assert equal(shard.get(chunk.header.chunk_id), chunk)
    shard.close()
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = Shard(replace(shard.config, data_dir=tmp_path / "moved"))
    assert equal(moved.get(chunk.header.chunk_id), chunk)
    moved.close()


def test_a_failed_fdatasync_is_never_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports lost writes once: a second round that succeeds says nothing of them."""
    shard = Shard(config(tmp_path))
    shard.put(ROWS, random_chunk(ROWS, 10, 1), "disk")
    calls = fail_once(monkeypatch, os, "fdatasync", errno.EIO)
    for _ in range(2):
        with pytest.raises(errors.InternalError, match=r"fdatasync of .*arrows: Input/output error"):
            shard.sync("run")
    assert len(calls) == 1
    shard.close()


def test_writers_that_sync_at_once_share_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(config(tmp_path))
    real, calls, ready = os.fdatasync, [], threading.Barrier(16)

    def slow(descriptor: int) -> None:
        calls.append(descriptor)
        threading.Event().wait(0.02)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)

    def write(seed: int) -> None:
        shard.put(ROWS, random_chunk(ROWS, 10, seed), "disk")
        ready.wait()
        shard.sync("run")

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(calls) <= 4
    monkeypatch.undo()
    shard.close()


def test_a_sidecar_that_cannot_be_written_costs_a_walk_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(config(tmp_path, extent_bytes=1 << 20))
    first, second = random_chunk(ROWS, 40_000, 1), random_chunk(ROWS, 40_000, 2)
    shard.put(ROWS, first, "process")
    fail_once(monkeypatch, sidecar, "write", errno.ENOSPC)
    assert shard.put(ROWS, second, "process")
    monkeypatch.undo()
    shard.close()
    again = Shard(shard.config)
    assert (again.recovery.walked, again.recovery.extents) == (1, 2)
    assert equal(again.get(first.header.chunk_id), first)
    assert equal(again.get(second.header.chunk_id), second)
    again.close()


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, errors.StoreFull), (errno.EMFILE, errors.Unavailable)]
)
def test_no_room_for_another_file_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[errors.ArrowTQError]
) -> None:
    shard = Shard(config(tmp_path))
    shard.put(ROWS, random_chunk(ROWS, 10, 1), "process")
    chunk, real = random_chunk(OTHER, 10, 2), os.open

    def full(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_EXCL:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type, no-any-return]

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(error, match="arrows"):
        shard.put(OTHER, chunk, "process")
    monkeypatch.undo()
    assert shard.put(OTHER, chunk, "process")
    assert equal(shard.get(chunk.header.chunk_id), chunk)
    shard.close()


def test_a_full_store_takes_back_what_is_ready_and_what_is_dropped(tmp_path: Path) -> None:
    """Without waiting for upkeep: idle writers' memory ahead, and extents of dropped chunks only."""
    shard = Shard(config(tmp_path, capacity_bytes=2 << 20, grow_bytes=1 << 20, seal_idle_s=3600.0))
    kept, dropped = random_chunk(ROWS, 1000, 1), random_chunk(OTHER, 1000, 2)
    shard.put(ROWS, kept, "process")
    shard.put(OTHER, dropped, "process")
    shard.drop([dropped.header.chunk_id])
    third = Field("third", "uint8")
    large = random_chunk(third, 1_900_000, 3)
    assert shard.put(third, large, "process")
    more = random_chunk(ROWS, 1000, 4)
    assert shard.put(ROWS, more, "process")
    for chunk in (kept, large, more):
        assert equal(shard.get(chunk.header.chunk_id), chunk)
    with pytest.raises(errors.StoreFull, match="2097152"):
        shard.put(OTHER, random_chunk(OTHER, 100_000, 5), "process")
    assert shard.usage().used_bytes <= 2 << 20
    shard.close()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.arrows")) == shard.usage().used_bytes


def test_a_writer_whose_chunks_are_all_dropped_is_not_full(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, capacity_bytes=1 << 20, grow_bytes=1 << 16, seal_idle_s=3600.0))
    for seed in range(5):
        chunk = random_chunk(ROWS, 50_000, seed)
        assert shard.put(ROWS, chunk, "process")
        with pytest.raises(errors.StoreFull, match="1048576"):
            shard.put(ROWS, random_chunk(ROWS, 50_000, 100 + seed), "process")
        assert equal(shard.get(chunk.header.chunk_id), chunk)
        shard.drop([chunk.header.chunk_id])
    shard.close()


def test_another_declaration_of_a_stored_field_is_refused(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    shard.put(ROWS, random_chunk(ROWS, 10, 1), "process")
    shard.close()
    again = Shard(shard.config)
    other = Field("rows", "float32", (4,))
    with pytest.raises(errors.Conflict, match=r"field 'rows'.*stored as"):
        again.put(other, random_chunk(other, 10, 2), "process")
    again.close()
