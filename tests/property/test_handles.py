"""Handles: grouped as they were expanded, and no sum of two of them passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq_schemas import handles
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.handles import BLOCK_ROWS, Kind
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import SPAN_DTYPE, Span, from_spans, to_spans

ids = st.builds(ChunkId.make, st.just(0x0197A0B1C2D3), st.just(5), st.just(0), st.integers(0, 3))
pieces = st.one_of(
    st.builds(Span, st.just(0), ids, st.integers(0, 9), st.integers(1, 9)),
    st.tuples(st.sampled_from([Kind.FILL, Kind.HOLE, 0]), st.integers(1, 3)),
)


def build(parts: list[Span | tuple[int, int]]) -> np.ndarray:
    rows = [np.empty((0, handles.WORDS), np.int32)]
    for part in parts:
        if isinstance(part, Span):
            rows.append(handles.expand(to_spans([part])))
        elif part[0]:
            rows.append(handles.constant(Kind(part[0]), part[1]))
        else:
            rows.append(np.zeros((part[1], handles.WORDS), np.int32))
    return np.concatenate(rows)


@settings(deadline=None)
@given(st.lists(pieces, max_size=12), st.sampled_from([np.int32, np.int64]))
def test_groups_are_the_longest_runs(parts: list[Span | tuple[int, int]], dtype: type) -> None:
    rows = build(parts)
    grouped = handles.group(rows.astype(dtype))
    assert grouped.kinds.tolist() == handles.kinds(rows).tolist()
    again = rows * 0
    for span, place in zip(from_spans(grouped.spans), grouped.places.tolist(), strict=True):
        again[place : place + span.rows] = handles.expand(to_spans([span]))
    for kind in (Kind.FILL, Kind.HOLE):
        again[grouped.kinds == kind] = handles.constant(kind, 1)
    np.testing.assert_array_equal(again, rows)
    ends = grouped.places + grouped.spans["rows"].astype(np.int64)
    for one, two in zip(range(len(ends) - 1), range(1, len(ends)), strict=True):
        first, second = grouped.spans[one], grouped.spans[two]
        follows = all(first[name] == second[name] for name in ("high", "low"))
        follows &= int(first["row"]) + int(first["rows"]) == int(second["row"])
        assert not (follows and ends[one] == grouped.places[two])


def test_runs_go_on_over_blocks() -> None:
    spans = to_spans([Span(0, ChunkId.make(1, 0, 0, 1), 7, 2 * BLOCK_ROWS + 5)])
    rows = handles.expand(spans)
    assert from_spans(handles.group(rows).spans) == from_spans(spans)
    holed = np.concatenate([rows[:BLOCK_ROWS], handles.constant(Kind.HOLE, 1), rows[BLOCK_ROWS:]])
    grouped = handles.group(holed)
    assert grouped.places.tolist() == [0, BLOCK_ROWS + 1]
    assert grouped.spans["rows"].tolist() == [BLOCK_ROWS, BLOCK_ROWS + 5]
    empty = handles.group(rows[:0])
    assert (len(empty.kinds), len(empty.spans), empty.spans.dtype) == (0, 0, SPAN_DTYPE)
    holed[BLOCK_ROWS + 9] += 1
    with pytest.raises(MalformedMessage, match=f"row {BLOCK_ROWS + 9}"):
        handles.group(holed)


@settings(deadline=None)
@given(st.lists(pieces, min_size=1, max_size=4), st.lists(pieces, min_size=1, max_size=4), st.booleans())
def test_a_sum_of_two_handles_never_passes(
    one: list[Span | tuple[int, int]], two: list[Span | tuple[int, int]], wide: bool
) -> None:
    left, right = build(one), build(two)
    size = min(len(left), len(right))
    dtype = np.int64 if wide else np.int32
    with np.errstate(over="ignore"):
        summed = left[:size].astype(dtype) + right[:size].astype(dtype)
    both = left[:size].any(axis=1) & right[:size].any(axis=1)
    for row in np.flatnonzero(both):
        with pytest.raises(MalformedMessage, match="check"):
            handles.group(summed[row : row + 1])
    alone = summed[~both]
    if len(alone):
        handles.group(alone)
