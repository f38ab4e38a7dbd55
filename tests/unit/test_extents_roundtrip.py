"""Every dtype and shape: through put, get, a crash, and a close, bit by bit; and for any Arrow reader."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import polars
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from arrow_tq import Field
from arrow_tq.store.shard import Shard
from arrow_tq_schemas import dtypes
from arrow_tq_schemas.chunks import from_array
from tests.chunking import config, equal, random_chunk, reopen_after_crash


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dtype=st.sampled_from(dtypes.NAMES),
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    nulls=st.booleans(),
    durability=st.sampled_from(["process", "disk"]),
)
def test_what_is_put_is_got(
    dtype: str, shape: tuple[int, ...], rows: list[int], nulls: bool, durability: str
) -> None:
    field = Field("some", dtype, shape)
    with tempfile.TemporaryDirectory() as folder:
        shard = Shard(config(Path(folder), extent_bytes=1 << 20, grow_bytes=1 << 16))
        chunks = [random_chunk(field, count, seed, nulls) for seed, count in enumerate(rows)]
        for chunk in chunks:
            assert shard.put(field, chunk, durability)  # type: ignore[arg-type]
            assert equal(shard.get(chunk.header.chunk_id), chunk)
        crashed = reopen_after_crash(shard)
        assert all(equal(crashed.get(chunk.header.chunk_id), chunk) for chunk in chunks)
        crashed.close()
        closed = Shard(shard.config)
        assert (closed.recovery.walked, closed.recovery.chunks) == (0, len(chunks))
        assert all(equal(closed.get(chunk.header.chunk_id), chunk) for chunk in chunks)
        closed.close()
        shard._populator.stop()


@pytest.mark.parametrize("dtype", dtypes.NAMES)
@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_any_arrow_reader_sees_the_rows(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    field = Field("some", dtype, shape)
    shard = Shard(config(tmp_path))
    chunks = [random_chunk(field, 50 + seed, seed, nulls=seed == 1) for seed in range(3)]
    for chunk in chunks:
        shard.put(field, chunk, "process")
    shard.close()
    (path,) = tmp_path.rglob("*.arrows")
    batches = list(pa.ipc.open_stream(pa.memory_map(str(path))))
    assert batches[0].schema.equals(field.arrow_schema())
    for batch, chunk in zip(batches, chunks, strict=True):
        values, valid = from_array(batch.column(0), shape)
        assert values.tobytes() == chunk.values.tobytes()
        np.testing.assert_array_equal(valid, chunk.valid)
    if not shape and dtype != "float16":
        column = polars.read_ipc_stream(path)["some"]
        assert column.null_count() == sum(int((~one.valid).sum()) for one in chunks if one.valid is not None)
