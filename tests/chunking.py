"""Chunks for tests of the shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardConfig
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, checksum
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId, IdFactory

IDS = IdFactory()


def config(folder: Path, capacity_bytes: int = 1 << 30, **changes: float) -> ShardConfig:
    """A shard under ``folder``."""
    settings = {"recycle_bytes": 0, **changes}
    return ShardConfig(folder / "data", folder / "memory", capacity_bytes, **settings)  # type: ignore[arg-type]


def chunk_of(
    field: Field,
    values: npt.NDArray[np.generic],
    valid: npt.NDArray[np.bool_] | None = None,
    run: str = "run",
    start: int = 0,
    chunk_id: ChunkId | None = None,
) -> Chunk:
    """A chunk with a right checksum."""
    chunk_id = chunk_id or IDS.next(0)
    digest = checksum(chunk_id, run, 1, field.name, start, values, valid)
    header = ChunkHeader(
        id=chunk_id.hex, run=run, epoch=1, field=field.name, start=start, rows=len(values), checksum=digest
    )
    return Chunk(header, values, valid)


def random_chunk(field: Field, rows: int, seed: int, nulls: bool = False, run: str = "run") -> Chunk:
    """Seeded values over the whole range of the storage dtype's bytes."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, rows * field.row_bytes, dtype=np.uint8)
    values = raw.view(field.type.numpy).reshape(rows, *field.shape).copy()
    valid = None
    if nulls and rows > 1:
        valid = random.random(rows) < 0.6
        valid[:2] = [True, False]
        values[~valid] = 0
    return chunk_of(field, values, valid, run, start=seed)


def equal(left: Chunk | None, right: Chunk) -> bool:
    """Header, bits of the values, and validity."""
    if left is None or left.header != right.header or left.values.dtype != right.values.dtype:
        return False
    if left.values.shape != right.values.shape or left.values.tobytes() != right.values.tobytes():
        return False
    if left.valid is None or right.valid is None:
        return left.valid is right.valid
    return bool((left.valid == right.valid).all())


def reopen_after_crash(shard: Shard) -> Shard:
    """What a new process sees when the old one was killed: no seal, no sidecar."""
    # Descriptors and mappings of the abandoned shard stay open, as those of a reader elsewhere would.
    return Shard(shard.config)
