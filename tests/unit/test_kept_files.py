"""Mapped files of a server: locked exactly while they are viewed, and kept for a bounded time and size."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from arrow_tq.client.samehost.kept import KeptFiles, WritableFile
from arrow_tq.client.samehost.mappings import Mapping, Mappings
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas.commands import ExtentPlace

MIB = 1 << 20


def made(path: Path, size_bytes: int = MIB, value: int = 0) -> Path:
    path.write_bytes(bytes([value]) * size_bytes)
    return path


def is_free(path: Path) -> bool:
    """Whether the server could take the file for something else."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_a_written_file_is_locked_while_any_view_is_alive(tmp_path: Path) -> None:
    path = made(tmp_path / "file")
    file = WritableFile(str(path), MIB)
    assert is_free(path)
    first, second = file.memory(), file.memory()
    view = first[100:200].view(np.uint32).reshape(5, 5)
    raw = memoryview(first)[:10]
    assert not is_free(path)
    del first, second
    assert not is_free(path)
    view[...] = 7
    del view
    assert not is_free(path), "bytes of it are viewed"
    raw.release()
    gc.collect()
    assert is_free(path)
    again = file.memory()
    assert (again[100:200].view(np.uint32) == 7).all()
    assert not is_free(path)


def test_a_file_that_the_server_takes_is_not_written(tmp_path: Path) -> None:
    path = made(tmp_path / "file")
    file = WritableFile(str(path), MIB)
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        file.memory()
    os.close(descriptor)
    file.memory()[0] = 1


def test_a_file_that_the_server_cut_is_not_written(tmp_path: Path) -> None:
    """Its mapping reaches beyond its end now: the first write there would end this process."""
    path = made(tmp_path / "file")
    file = WritableFile(str(path), MIB)
    os.truncate(path, MIB // 2)
    with pytest.raises(OSError, match="cut"):
        file.memory()
    assert is_free(path)


def test_descriptors_go_with_their_files(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = KeptFiles()
    for number in range(5):
        file = WritableFile(str(made(tmp_path / str(number))), MIB)
        view = file.memory()[1:]
        kept.keep(file)
        del view
    del file
    kept.close()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


FORK = """
import fcntl, os, sys
from pathlib import Path
from arrow_tq.client.samehost.kept import WritableFile
from arrow_tq.client.samehost.mappings import Mapping
path = Path(sys.argv[1])
if sys.argv[2] == "written":
    holder = WritableFile(str(path), path.stat().st_size)
    memory = holder.memory()
else:
    holder, memory = Mapping.open(path)
view = memory[10:20]
del memory
read, write = os.pipe()
if not (child := os.fork()):
    os.read(read, 1)
    del view
    os._exit(0)
def free():
    other = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(other)
assert not free()
del view
assert not free(), "the fork views it still"
os.write(write, b"x")
os.waitpid(child, 0)
assert free()
view = holder.memory()[1:]
if not (child := os.fork()):
    del view
    os._exit(0)
os.waitpid(child, 0)
assert not free(), "what the fork let go of is viewed here"
"""


@pytest.mark.parametrize("kind", ["written", "read"])
def test_a_fork_and_its_parent_hold_one_lock(tmp_path: Path, kind: str) -> None:
    path = made(tmp_path / "file")
    subprocess.run([sys.executable, "-c", FORK, str(path), kind], check=True, timeout=60)


def test_a_kept_file_is_found_by_what_it_is(tmp_path: Path) -> None:
    kept = KeptFiles()
    path = made(tmp_path / "000000")
    file = WritableFile(str(path), MIB)
    kept.keep(file)
    moved = path.rename(tmp_path / "000007")
    other = made(path)
    assert kept.take(str(other), MIB) is None
    assert kept.take(str(moved), 2 * MIB) is None, "of another size: mapped anew"
    kept.keep(file)
    assert kept.take(str(moved), MIB) is file
    assert kept.take(str(moved), MIB) is None
    assert kept.again == 1


def test_what_is_kept_is_bounded_in_size_and_time(tmp_path: Path) -> None:
    kept = KeptFiles(keep_s=0.3, keep_bytes=8 * MIB)
    files = [WritableFile(str(made(tmp_path / str(number))), MIB) for number in range(10)]
    for file in files:
        kept.keep(file)
    assert kept.kept_bytes == MIB, "none came back yet"
    assert kept.take(str(tmp_path / "1"), MIB) is None
    assert kept.take(str(tmp_path / "0"), MIB) is not None
    for file in files:
        kept.keep(file)
    assert kept.kept_bytes == 8 * MIB
    for number, file in enumerate(files):
        again = kept.take(str(tmp_path / str(number)), MIB)
        assert (again is file) == (number < 8), "of more than are kept some come back"
        kept.keep(file)
    assert kept.tend()
    time.sleep(0.35)
    assert not kept.tend()
    assert kept.kept_bytes == 0
    kept.close()
    kept.keep(WritableFile(str(tmp_path / "2"), MIB))
    assert kept.kept_bytes == 0


def test_what_is_kept_is_bounded_in_descriptors(tmp_path: Path) -> None:
    kept = KeptFiles(keep_files=2)
    for number in range(5):
        kept.keep(WritableFile(str(made(tmp_path / str(number))), MIB))
    assert kept.kept_bytes == 2 * MIB
    assert kept.take(str(tmp_path / "2"), MIB) is None
    assert kept.take(str(tmp_path / "1"), MIB) is not None


def test_a_deleted_file_is_let_go(tmp_path: Path) -> None:
    kept = KeptFiles()
    first, second = made(tmp_path / "1"), made(tmp_path / "2")
    for path in (first, second):
        kept.keep(WritableFile(str(path), MIB))
    first.unlink()
    assert kept.tend()
    assert kept.kept_bytes == MIB


def place(path: Path) -> ExtentPlace:
    return ExtentPlace(token=path.name, path=str(path))


def test_a_read_extent_is_locked_while_it_is_viewed(tmp_path: Path) -> None:
    path = made(tmp_path / "000000", value=3)
    mappings = Mappings(60.0, 10)
    _, memory = mappings.get(place(path)) or pytest.fail()
    view = memory[5:10]
    del memory
    assert not is_free(path)
    del view
    assert is_free(path)
    found = mappings.get(place(path))
    assert found is not None
    assert not is_free(path)
    del found
    path.rename(tmp_path / "000001")
    assert mappings.get(place(path)) is None, "its name leads elsewhere: it may be another extent"
    assert len(mappings) == 0
    mappings.close()


def test_the_mapping_of_a_file_that_is_another_extent_now_serves_that_one(tmp_path: Path) -> None:
    mappings = Mappings(60.0, 10)
    path = made(tmp_path / "000000", value=3)
    before, memory = mappings.get(place(path)) or pytest.fail()
    address = memory.ctypes.data
    del memory
    moved = path.rename(tmp_path / "000001")
    moved.write_bytes(bytes([4]) * MIB)
    after, memory = mappings.get(place(moved)) or pytest.fail()
    assert memory.ctypes.data == address
    assert (memory == 4).all()
    assert after is not before
    assert not after.chunks, "what was verified was another extent's"
    assert len(mappings) == 1
    assert not is_free(moved)
    assert mappings.get(place(path)) is None
    mappings.close()


def test_a_file_of_another_size_is_mapped_anew(tmp_path: Path) -> None:
    mappings = Mappings(60.0, 10)
    path = made(tmp_path / "000000", value=3)
    assert mappings.get(place(path)) is not None
    moved = path.rename(tmp_path / "000001")
    os.truncate(moved, 2 * MIB)
    found, memory = mappings.get(place(moved)) or pytest.fail()
    assert (found.size_bytes, len(memory)) == (2 * MIB, 2 * MIB)
    mappings.close()


def test_the_mapping_of_a_released_extent_is_kept_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arrow_tq.client.samehost.mappings.PERIOD_S", 0.05)
    monkeypatch.setattr("arrow_tq.client.samehost.mappings.KEEP_S", 1.0)
    mappings = Mappings(60.0, 10)
    paths = [made(tmp_path / str(number)) for number in range(2)]
    for path in paths:
        assert mappings.get(place(path)) is not None
    paths[0].rename(tmp_path / "recycled")
    time.sleep(0.3)
    assert len(mappings) == 2
    wait_until(lambda: len(mappings) == 1, 5)
    assert mappings.get(place(paths[1])) is not None
    mappings.close()


def test_a_mapping_never_follows_another_file_of_its_name(tmp_path: Path) -> None:
    path = made(tmp_path / "000000", value=1)
    opened = Mapping.open(path)
    assert opened is not None
    mapping = opened[0]
    del opened
    path.unlink()
    made(path, value=2)
    assert mapping.memory() is None
