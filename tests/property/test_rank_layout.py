"""A rank's rows against the cuts written out on lists of positions; together, ranks have every row once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq.adapters.replay import ContextSplit, RankLayout
from arrow_tq.adapters.replay.layout import PAD
from arrow_tq.adapters.replay.rows import place
from arrow_tq_schemas.errors import InvalidInput

lengths_of = st.lists(st.integers(1, 23), min_size=1, max_size=5)


def oracle(lengths: list[int], layout: RankLayout) -> list[int]:
    """Which packed token each of the rank's rows is, or PAD, by walking lists."""
    sequences, at = [], 0
    for length in lengths:
        rows = [*range(at, at + length - 1), PAD]
        width = layout.sequence_rows or length
        rows += [PAD] * (width - length)
        while len(rows) % layout.sample_multiple:
            rows.append(PAD)
        sequences.append(rows)
        at += length
    mine: list[int] = []
    if layout.context is ContextSplit.PACKED:
        packed = [row for rows in sequences for row in rows]
        while len(packed) % (layout.cp_size * layout.row_multiple):
            packed.append(PAD)
        share = len(packed) // layout.cp_size
        mine = packed[layout.cp_rank * share : (layout.cp_rank + 1) * share]
    else:
        for rows in sequences:
            if layout.cp_size == 1:
                mine += rows
                continue
            pieces_count = 2 * layout.cp_size
            while len(rows) % pieces_count:
                rows.append(PAD)
            size = len(rows) // pieces_count
            pieces = [rows[piece * size : (piece + 1) * size] for piece in range(pieces_count)]
            if layout.context is ContextSplit.ZIGZAG:
                mine += pieces[layout.cp_rank] + pieces[pieces_count - 1 - layout.cp_rank]
            else:
                mine += pieces[2 * layout.cp_rank] + pieces[2 * layout.cp_rank + 1]
        while len(mine) % layout.row_multiple:
            mine.append(PAD)
    share = len(mine) // layout.sp_size
    return mine[layout.sp_rank * share : (layout.sp_rank + 1) * share]


@settings(max_examples=150, deadline=None)
@given(
    lengths_of,
    st.sampled_from(ContextSplit),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
)
def test_ranks_share_every_row_once(
    lengths: list[int], context: ContextSplit, cp: int, sp: int, extra: int, multiple: int, padded: bool
) -> None:
    seen: list[int] = []
    for cp_rank in range(cp):
        for sp_rank in range(sp):
            layout = RankLayout(
                *(context, cp_rank, cp, sp_rank, sp, multiple, sp * extra),
                sequence_rows=max(lengths) if padded else None,
            )
            rows = layout.index(lengths)
            assert rows.tolist() == oracle(lengths, layout)
            assert layout.rows(lengths) == len(rows)
            seen += rows[rows != PAD].tolist()
    ends = np.cumsum([0, *lengths])
    forwarded = [row for start, end in pairwise(ends) for row in range(start, end - 1)]
    assert sorted(seen) == forwarded


@settings(max_examples=60, deadline=None)
@given(lengths_of, st.integers(1, 3), st.sampled_from(["uint8", "uint16", "int32"]), st.data())
def test_placed_rows_are_those_of_their_tokens(
    lengths: list[int], cp: int, dtype: str, data: st.DataObject
) -> None:
    experts, topk, layers = data.draw(st.integers(4, 300 if dtype != "uint8" else 200)), 4, 2
    random = np.random.default_rng(0)
    packed = random.integers(0, experts, (sum(lengths), layers, topk)).astype(dtype)
    for cp_rank in range(cp):
        layout = RankLayout(cp_rank=cp_rank, cp_size=cp, row_multiple=8)
        index = layout.index(lengths)
        rows = place(packed, index, experts)
        assert rows.dtype == packed.dtype
        np.testing.assert_array_equal(rows[index != PAD], packed[index[index != PAD]])
        for row in rows[index == PAD]:
            for choice in row.tolist():
                assert len(set(choice)) == topk
                assert max(choice) < experts


def test_padding_is_spread_over_experts() -> None:
    rows = place(np.zeros((1, 1, 2), np.uint8), np.full(64, PAD), 128)
    assert np.bincount(rows.reshape(-1), minlength=128).tolist() == [1] * 128


def test_wrong_places_are_refused() -> None:
    with pytest.raises(InvalidInput, match="cp_rank 2: expected 0 to cp_size - 1 = 1"):
        RankLayout(cp_rank=2, cp_size=2)
    with pytest.raises(InvalidInput, match="5 rows are not divided by sp_size 2"):
        RankLayout(sp_size=2).index([5])
    with pytest.raises(InvalidInput, match="a sequence of 5 tokens: sequence_rows is 4"):
        RankLayout(sequence_rows=4).index([5])
    assert RankLayout().index([]).tolist() == []
