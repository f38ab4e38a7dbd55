"""A damaged schema: the checksums of chunks do not cover it, so it must be told by itself, and outlived."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from arrow_tq import Field
from arrow_tq.store.extent_schema import COPY_NAME
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.chunks import Chunk
from tests.chunking import chunk_of, config, equal, random_chunk

ROWS = Field("rows", "int32", (4,))
PAGE = 4096


def sealed(folder: Path, count: int, rows: int) -> tuple[Shard, list[Chunk], Path, bytes]:
    shard = Shard(config(folder))
    chunks = [random_chunk(ROWS, rows, seed) for seed in range(count)]
    for chunk in chunks:
        shard.put(ROWS, chunk, "process")
    shard.close()
    (path,) = folder.rglob("*.arrows")
    return shard, chunks, path, path.read_bytes()


def without_sidecars(folder: Path) -> None:
    for path in folder.rglob("*.idx"):
        path.unlink()


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_sidecar", [True, False])
def test_a_flipped_bit_in_the_schema_changes_nothing(tmp_path: Path, has_sidecar: bool, every: int) -> None:
    """Every 17th bit of it, or each; int32 that becomes float32 would pass every checksum."""
    shard, (chunk,), path, content = sealed(tmp_path, 1, 20)
    end = 8 + int.from_bytes(content[4:8], "little")
    for bit in range(0, 8 * end, every):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if not has_sidecar:
            without_sidecars(tmp_path)
        again = Shard(shard.config)
        assert equal(again.get(chunk.header.chunk_id), chunk), f"bit {bit}"
        again.close()


@pytest.mark.parametrize("has_sidecar", [True, False])
def test_a_zeroed_first_page_takes_only_the_chunks_that_it_touches(tmp_path: Path, has_sidecar: bool) -> None:
    shard, chunks, path, content = sealed(tmp_path, 12, 200)
    if not has_sidecar:
        without_sidecars(tmp_path)
    path.write_bytes(bytes(PAGE) + content[PAGE:])
    again = Shard(shard.config)
    places = [content.index(chunk.values.tobytes()) for chunk in chunks]
    begin = [0, *(place + chunk.nbytes for place, chunk in zip(places, chunks, strict=True))]
    for index, chunk in enumerate(chunks):
        got = again.get(chunk.header.chunk_id)
        assert equal(got, chunk) or (begin[index] < PAGE and got is None), f"chunk {index}"
    assert again.get(chunks[-1].header.chunk_id) is not None
    again.close()


def test_an_extent_that_cannot_be_read_at_all_is_set_aside(tmp_path: Path) -> None:
    shard, chunks, path, content = sealed(tmp_path, 3, 200)
    damaged = bytes(64) + content[64:]
    path.write_bytes(damaged)
    (copy,) = tmp_path.rglob(COPY_NAME)
    copy.write_bytes(bytes(64))
    again = Shard(shard.config)
    assert again.recovery.set_aside == 1
    assert again.get(chunks[0].header.chunk_id) is None
    assert path.with_name(path.name + ".damaged").read_bytes() == damaged
    assert again.usage().used_bytes == 0
    again.close()


def test_padding_that_looks_like_messages_is_walked_past_quickly(tmp_path: Path) -> None:
    """(-1, 256) repeated: a candidate every 8 bytes of a damaged chunk."""
    shard = Shard(config(tmp_path))
    pairs = Field("pairs", "int32", (2,))
    values = np.tile(np.array([-1, 256], np.int32), (100_000, 1))
    chunks = [chunk_of(pairs, values), random_chunk(pairs, 500_000, 1)]
    for chunk in chunks:
        shard.put(pairs, chunk, "process")
    shard.close()
    without_sidecars(tmp_path)
    (path,) = tmp_path.rglob("*.arrows")
    content = bytearray(path.read_bytes())
    content[content.index(values.tobytes()) + 5] ^= 1
    path.write_bytes(content)
    started = time.monotonic()
    again = Shard(shard.config)
    assert time.monotonic() - started < 10
    assert again.get(chunks[0].header.chunk_id) is None
    assert equal(again.get(chunks[1].header.chunk_id), chunks[1])
    again.close()
