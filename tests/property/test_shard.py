"""Every dtype and item shape goes through an extent bit by bit, before and after reopening."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st

from arrow_tq import Field
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.dtypes import NAMES
from tests.chunking import config, equal, random_chunk, reopen_after_crash

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
chunks = st.tuples(st.integers(1, 40), st.integers(0, 2**31), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), shapes, st.lists(chunks, min_size=1, max_size=5), st.booleans())
def test_round_trip(
    dtype: str, shape: tuple[int, ...], plan: list[tuple[int, int, bool]], disk: bool
) -> None:
    field = Field("value", dtype, shape)
    with tempfile.TemporaryDirectory() as folder:
        shard = Shard(config(Path(folder), grow_bytes=1 << 16))
        made = [random_chunk(field, rows, seed, nulls) for rows, seed, nulls in plan]
        for chunk in made:
            assert shard.put(field, chunk, "disk" if disk else "process")
        assert all(equal(shard.get(chunk.header.chunk_id), chunk) for chunk in made)
        crashed = reopen_after_crash(shard)
        assert all(equal(crashed.get(chunk.header.chunk_id), chunk) for chunk in made)
        crashed.close()
        again = Shard(shard.config)
        assert all(equal(again.get(chunk.header.chunk_id), chunk) for chunk in made)
        again.close()
