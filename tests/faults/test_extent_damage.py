"""Damaged extents: cut, flipped, zeroed. A chunk comes back bit by bit or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from arrow_tq import errors, fields
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.chunks import Chunk
from tests.chunking import config, equal, random_chunk
from tests.warm import WarmProcess

EXPERTS = fields.routed_experts(8, 4)
TOPK = fields.indexer_topk(2, 8)
PAGE = 4096


def build(folder: Path, count: int = 24, rows: int = 700) -> tuple[list[Chunk], Path, bytes]:
    """A live extent as a killed process leaves it: its chunks, its path, and its bytes."""
    shard = Shard(config(folder, grow_bytes=1 << 16, ahead_bytes=1 << 16))
    made = [random_chunk(EXPERTS, rows + seed, seed, nulls=seed % 3 == 0) for seed in range(count)]
    for chunk in made:
        shard.put(EXPERTS, chunk, "process")
    (path,) = folder.rglob("*.arrows")
    return made, path, path.read_bytes()[: 2 * count * rows * 32]


def recovered(folder: Path, path: Path, content: bytes) -> Shard:
    """A shard over an extent of this content, without a sidecar."""
    for sidecar in folder.rglob("*.idx"):
        sidecar.unlink()
    path.write_bytes(content)
    return Shard(config(folder, grow_bytes=1 << 16))


def ends(content: bytes, made: list[Chunk]) -> list[int]:
    """Where each chunk's values end, found by their bytes."""
    places, place = [], 0
    for chunk in made:
        raw = chunk.values.tobytes()
        place = content.index(raw, place) + len(raw)
        places.append(place)
    return places


def test_cut_anywhere(tmp_path: Path) -> None:
    made, path, content = build(tmp_path)
    places = ends(content, made)
    for cut in range(0, places[-1] + PAGE, PAGE):
        shard = recovered(tmp_path, path, content[:cut])
        for chunk, end in zip(made, places, strict=True):
            got = shard.get(chunk.header.chunk_id)
            if end + 8 <= cut:
                assert equal(got, chunk), f"cut at {cut}: a chunk that ends at {end} is gone"
            else:
                assert got is None or equal(got, chunk)
        shard.close()


def test_a_zeroed_tail_as_a_torn_write_leaves_it(tmp_path: Path) -> None:
    made, path, content = build(tmp_path)
    places = ends(content, made)
    for cut in range(PAGE, places[-1], 7 * PAGE):
        shard = recovered(tmp_path, path, content[:cut].ljust(len(content), b"\0"))
        for chunk, end in zip(made, places, strict=True):
            got = shard.get(chunk.header.chunk_id)
            assert equal(got, chunk) if end <= cut else got is None or equal(got, chunk)
        shard.close()


def test_a_zeroed_page_takes_only_the_chunks_that_it_touches(tmp_path: Path) -> None:
    made, path, content = build(tmp_path)
    places = [0, *ends(content, made)]
    for page in range(PAGE, places[-1] - PAGE, 11 * PAGE):
        shard = recovered(tmp_path, path, content[:page] + bytes(PAGE) + content[page + PAGE :])
        for index, chunk in enumerate(made):
            got = shard.get(chunk.header.chunk_id)
            touched = places[index] < page + PAGE and page < places[index + 1]
            assert equal(got, chunk) or (touched and got is None), f"page {page}, chunk {index}"
        shard.close()


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_never_give_a_wrong_row(tmp_path: Path, seed: int) -> None:
    made, path, content = build(tmp_path, count=12)
    end = ends(content, made)[-1]
    random = np.random.default_rng(seed)
    for _ in range(25):
        damaged = bytearray(content)
        for place in random.integers(0, end, random.integers(1, 6)):
            damaged[place] ^= 1 << random.integers(0, 8)
        shard = recovered(tmp_path, path, bytes(damaged))
        for chunk in made:
            got = shard.get(chunk.header.chunk_id)
            assert got is None or equal(got, chunk)
        shard.close()


def test_damage_in_a_sealed_extent_is_found_at_first_touch(tmp_path: Path) -> None:
    made, path, content = build(tmp_path, count=3)
    shard = recovered(tmp_path, path, content)
    shard.close()
    sealed = bytearray(path.read_bytes())
    sealed[sealed.index(made[1].values.tobytes()) + 100] ^= 4
    path.write_bytes(sealed)
    again = Shard(shard.config)
    assert again.recovery.walked == 0
    assert equal(again.get(made[0].header.chunk_id), made[0])
    assert again.get(made[1].header.chunk_id) is None
    assert again.usage().corrupt_chunks == 1
    assert equal(again.get(made[2].header.chunk_id), made[2])
    again.close()


def test_values_that_look_like_messages_do_not_mislead_the_walk(tmp_path: Path) -> None:
    shard = Shard(config(tmp_path))
    chunk = random_chunk(TOPK, 500, 1)
    chunk.values[::2] = -1
    chunk.values[1::2] = 256
    made = [random_chunk(TOPK, 300, seed) for seed in range(3)]
    fake = random_chunk(TOPK, 500, 7)
    fake.values[:] = chunk.values
    for one in made:
        shard.put(TOPK, one, "process")
    (path,) = tmp_path.rglob("*.arrows")
    content = bytearray(path.read_bytes()[: 1 << 20])
    place = content.index(made[1].values.tobytes())
    content[place : place + fake.values.nbytes // 2] = fake.values.tobytes()[: fake.values.nbytes // 2]
    again = recovered(tmp_path, path, bytes(content))
    assert equal(again.get(made[0].header.chunk_id), made[0])
    assert again.get(made[1].header.chunk_id) is None
    again.close()


WRITER = """
import sys
from pathlib import Path
from arrow_tq import fields
from arrow_tq.store.shard import Shard
from tests.chunking import config, random_chunk
shard = Shard(config(Path(sys.argv[1]), extent_bytes=1 << 20, grow_bytes=1 << 16, ahead_bytes=1 << 18))
seed = int(sys.argv[2])
while True:
    chunk = random_chunk(fields.routed_experts(8, 4), 300 + seed % 500, seed)
    shard.put(fields.routed_experts(8, 4), chunk, "process")
    print(seed, chunk.header.id, chunk.header.checksum, flush=True)
    seed += 1
"""


def test_killed_while_appending(tmp_path: Path) -> None:
    """The parent keeps the journal: what the writer said is stored must be there."""
    random = np.random.default_rng(0)
    acked: list[tuple[str, str]] = []
    for round_ in range(5):
        with WarmProcess("-c", WRITER, str(tmp_path), str(1000 * round_)) as writer:
            acked.append(tuple(writer.stdout.readline().split()[1:]))  # type: ignore[arg-type]
            time.sleep(float(random.uniform(0.02, 0.2)))
            writer.kill()
            lines = writer.stdout.read().splitlines()
        acked.extend(tuple(line.split()[1:]) for line in lines if len(line.split()) == 3)  # type: ignore[misc]
    shard = Shard(config(tmp_path))
    found = {chunk_id.hex: shard.get(chunk_id) for chunk_id in shard.ids()}
    for name, digest in acked:
        got = found.get(name)
        assert got is not None and got.header.checksum == digest
    assert all(chunk is not None for chunk in found.values())
    shard.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_filesystem_is_a_typed_error(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that nothing is left mounted."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    code = (
        "import sys; from pathlib import Path; from tests.faults.test_extent_damage import fill_small;"
        "fill_small(Path(sys.argv[1]))"
    )
    script = (
        f'mount -t tmpfs -o size=16m tmpfs "{mounted}" && exec "{sys.executable}" -c \'{code}\' "{mounted}"'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["stored"] > 100
    assert report["error"] == "store-full"


def fill_small(folder: Path) -> None:
    """Fill a small filesystem, then check everything, make room, and write again."""
    shard = Shard(config(folder, seal_idle_s=0.0))
    stored: list[Chunk] = []
    code = ""
    try:
        for seed in range(10_000):
            chunk = random_chunk(EXPERTS, 2000, seed)
            shard.put(EXPERTS, chunk, "process")
            stored.append(chunk)
    except errors.StoreFull as error:
        code = error.code
    assert all(equal(shard.get(chunk.header.chunk_id), chunk) for chunk in stored)
    shard.drop([chunk.header.chunk_id for chunk in stored])
    shard.maintain()
    assert shard.put(EXPERTS, random_chunk(EXPERTS, 2000, 1), "process")
    print(json.dumps({"stored": len(stored), "error": code}))
