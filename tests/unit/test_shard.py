"""The shard: what is put is got, once; what is dropped is gone, with its bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars
import pyarrow as pa
import pytest

from arrow_tq import Field, errors, fields
from arrow_tq.store.shard import Shard
from tests.chunking import chunk_of, config, equal, random_chunk, reopen_after_crash

EXPERTS = fields.routed_experts(8, 4)
TOKENS = fields.token_ids()


def extents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.arrows"))


def test_a_chunk_is_read_back_as_views_of_the_extent(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunk = random_chunk(EXPERTS, 100, 1, nulls=True)
    assert shard.put(EXPERTS, chunk, "process")
    got = shard.get(chunk.header.chunk_id)
    assert equal(got, chunk)
    assert got is not None and not got.values.flags.writeable and not got.values.flags.owndata
    assert shard.header(chunk.header.chunk_id) == chunk.header
    shard.close()


def test_the_same_chunk_again_is_no_error_and_another_is(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunk = random_chunk(TOKENS, 10, 1)
    assert shard.put(TOKENS, chunk, "process")
    assert not shard.put(TOKENS, chunk, "process")
    other = chunk_of(TOKENS, chunk.values + 1, start=1, chunk_id=chunk.header.chunk_id)
    with pytest.raises(errors.Conflict, match=f"(?s){chunk.header.checksum}.*{other.header.checksum}"):
        shard.put(TOKENS, other, "process")
    assert equal(shard.get(chunk.header.chunk_id), chunk)
    assert shard.usage().chunks == 1
    shard.close()


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_chunks_are_there_after_a_close_and_after_a_crash(tmp_path: Path, durability: str) -> None:
    shard = Shard(config(tmp_path))
    chunks = [random_chunk(EXPERTS, rows, rows, nulls=rows % 2 == 0) for rows in (1, 2, 50, 999)]
    for chunk in chunks:
        shard.put(EXPERTS, chunk, durability)  # type: ignore[arg-type]
    shard.sync("run")
    crashed = reopen_after_crash(shard)
    assert (crashed.recovery.walked, crashed.recovery.chunks) == (1, 4)
    assert all(equal(crashed.get(chunk.header.chunk_id), chunk) for chunk in chunks)
    crashed.close()
    again = Shard(shard.config)
    assert (again.recovery.walked, again.recovery.chunks) == (0, 4)
    assert all(equal(again.get(chunk.header.chunk_id), chunk) for chunk in chunks)
    root = tmp_path / ("data" if durability == "disk" else "memory")
    assert [path.is_relative_to(root) for path in extents(tmp_path)] == [True]
    again.close()


def test_a_damaged_sidecar_is_not_believed(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunk = random_chunk(TOKENS, 100, 1)
    shard.put(TOKENS, chunk, "process")
    shard.close()
    (sidecar,) = tmp_path.rglob("*.idx")
    content = bytearray(sidecar.read_bytes())
    content[len(content) // 2] ^= 1
    sidecar.write_bytes(content)
    again = Shard(shard.config)
    assert again.recovery.walked == 1
    assert equal(again.get(chunk.header.chunk_id), chunk)
    again.close()


def test_a_sealed_extent_is_an_arrow_stream_for_anyone(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunks = [random_chunk(TOKENS, rows, rows) for rows in (3, 1000)]
    for chunk in chunks:
        shard.put(TOKENS, chunk, "process")
    shard.close()
    (path,) = extents(tmp_path)
    expected = np.concatenate([chunk.values for chunk in chunks])
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    table.validate(full=True)
    np.testing.assert_array_equal(table.column("token_ids").to_numpy(), expected)
    frame = polars.read_ipc_stream(path)
    np.testing.assert_array_equal(frame["token_ids"].to_numpy(), expected)


def test_a_full_extent_is_followed_by_another(tmp_path: Path) -> None:
    settings = config(tmp_path, extent_bytes=1 << 20, ahead_bytes=1 << 18, grow_bytes=1 << 18)
    shard = Shard(settings)
    chunks = [random_chunk(EXPERTS, 5000, seed) for seed in range(20)]
    larger = random_chunk(EXPERTS, 100_000, 99)
    for chunk in [*chunks, larger]:
        shard.put(EXPERTS, chunk, "process")
    assert len(extents(tmp_path)) >= 5
    assert all(equal(shard.get(chunk.header.chunk_id), chunk) for chunk in [*chunks, larger])
    again = reopen_after_crash(shard)
    assert all(equal(again.get(chunk.header.chunk_id), chunk) for chunk in [*chunks, larger])
    again.close()


def test_dropped_chunks_give_their_bytes_back_when_nobody_looks(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0))
    chunks = [random_chunk(EXPERTS, 1000, seed) for seed in range(4)]
    for chunk in chunks:
        shard.put(EXPERTS, chunk, "process")
    view = shard.get(chunks[0].header.chunk_id)
    shard.drop([chunk.header.chunk_id for chunk in chunks])
    assert shard.get(chunks[0].header.chunk_id) is None
    shard.maintain()
    assert extents(tmp_path) == []
    usage = shard.usage()
    assert usage.chunks == usage.extents == 0
    assert usage.used_bytes == usage.zombie_bytes > 0, "a view keeps the memory, so it counts"
    assert equal(view, chunks[0])
    del view
    shard.maintain()
    assert shard.usage().used_bytes == 0
    shard.close()


def test_bytes_count_while_another_process_holds_the_lock(tmp_path: Path) -> None:
    import fcntl

    shard = Shard(config(tmp_path, seal_idle_s=0.0))
    chunk = random_chunk(EXPERTS, 1000, 1)
    shard.put(EXPERTS, chunk, "process")
    # flock belongs to the open file, so another descriptor stands for another process.
    with extents(tmp_path)[0].open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        shard.drop([chunk.header.chunk_id])
        shard.maintain()
        assert extents(tmp_path) == []
        assert shard.usage().zombie_bytes > 0
    shard.maintain()
    assert shard.usage().used_bytes == 0
    shard.close()


def test_pinned_chunks_are_no_orphans(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    first, second = random_chunk(TOKENS, 1, 1), random_chunk(TOKENS, 1, 2)
    for chunk in (first, second):
        shard.put(TOKENS, chunk, "process")
    missing = chunk_of(TOKENS, first.values).header.chunk_id
    assert shard.pin([first.header.chunk_id, missing]) == [missing]
    assert not shard.is_pinned(first.header.chunk_id)
    assert shard.pin([first.header.chunk_id]) == []
    assert shard.orphans(0.0) == [second.header.chunk_id]
    assert shard.orphans(60.0) == []
    assert shard.drop_unpinned([first.header.chunk_id, second.header.chunk_id]) == 1
    assert shard.ids() == [first.header.chunk_id]
    shard.unpin([first.header.chunk_id])
    assert shard.orphans(0.0) == [first.header.chunk_id]
    shard.close()


def test_past_the_capacity_is_a_typed_error_and_nothing_is_left(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, capacity_bytes=1 << 20, grow_bytes=1 << 16, seal_idle_s=0.0))
    stored = []
    with pytest.raises(errors.StoreFull, match="1048576") as caught:
        for seed in range(1000):
            chunk = random_chunk(EXPERTS, 1000, seed)
            shard.put(EXPERTS, chunk, "process")
            stored.append(chunk)
    assert caught.value.retryable
    assert len(stored) > 20
    other = Field("other", "int64")
    with pytest.raises(errors.StoreFull):
        shard.put(other, random_chunk(other, 20_000, 1), "process")
    assert all(equal(shard.get(chunk.header.chunk_id), chunk) for chunk in stored)
    assert len(extents(tmp_path)) == 1
    shard.drop([chunk.header.chunk_id for chunk in stored])
    shard.maintain()
    assert shard.put(other, random_chunk(other, 20_000, 1), "process")
    shard.close()


def test_many_writers_and_readers_at_once(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, extent_bytes=1 << 20, ahead_bytes=1 << 18))
    done = threading.Event()
    written: list[object] = []

    def write(seed: int) -> None:
        field = (EXPERTS, TOKENS)[seed % 2]
        for index in range(30):
            chunk = random_chunk(field, 50 + index, 100 * seed + index, nulls=index % 3 == 0)
            assert shard.put(field, chunk, "process")
            written.append(chunk)

    def read() -> int:
        count = 0
        while not done.is_set() or count == 0:
            for chunk in written:
                assert equal(shard.get(chunk.header.chunk_id), chunk)  # type: ignore[attr-defined, arg-type]
                count += 1
        return count

    with ThreadPoolExecutor(10) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        list(pool.map(write, range(8)))
        done.set()
        assert all(reader.result() > 0 for reader in readers)
    assert shard.usage().chunks == 240
    shard.close()


def test_released_memory_is_used_again_and_never_read_as_before(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path, seal_idle_s=0.0, recycle_bytes=64 << 20, recycle_idle_s=60.0))
    old = [random_chunk(EXPERTS, 1000, seed) for seed in range(30)]
    for chunk in old:
        shard.put(EXPERTS, chunk, "process")
    view = shard.get(old[3].header.chunk_id)
    shard.drop([chunk.header.chunk_id for chunk in old])
    shard.maintain()
    assert shard.usage().recycled_bytes == 0, "somebody still looks at it"
    assert equal(view, old[3])
    del view
    shard.maintain()
    kept = shard.usage().recycled_bytes
    assert kept > 900_000
    assert shard.usage().used_bytes == 0
    other = random_chunk(EXPERTS, 1000, 99, run="other")
    shard.put(EXPERTS, other, "process")
    assert shard.usage().recycled_bytes == kept, "only the run that it was of may have it"
    new = [random_chunk(TOKENS, 100, 50), random_chunk(TOKENS, 10, 51)]
    for chunk in new:
        shard.put(TOKENS, chunk, "process")
    assert shard.usage().recycled_bytes == 0
    assert all(equal(shard.get(chunk.header.chunk_id), chunk) for chunk in new)
    # What is left of the old chunks in that file is not found after a crash either.
    again = reopen_after_crash(shard)
    assert sorted(again.ids()) == sorted(chunk.header.chunk_id for chunk in [other, *new])
    assert all(equal(again.get(chunk.header.chunk_id), chunk) for chunk in [other, *new])
    again.close()


def test_recycled_memory_makes_room_when_it_is_needed(tmp_path: Path) -> None:
    shard = Shard(
        config(tmp_path, capacity_bytes=4 << 20, grow_bytes=1 << 16, seal_idle_s=0.0, recycle_bytes=4 << 20)
    )
    chunk = random_chunk(EXPERTS, 60_000, 1)
    shard.put(EXPERTS, chunk, "process")
    shard.drop([chunk.header.chunk_id])
    shard.maintain()
    assert shard.usage().recycled_bytes > 1 << 20
    other = random_chunk(EXPERTS, 100_000, 2, run="other")
    assert shard.put(EXPERTS, other, "process")
    assert equal(shard.get(other.header.chunk_id), other)
    assert shard.usage().recycled_bytes == 0
    shard.close()
