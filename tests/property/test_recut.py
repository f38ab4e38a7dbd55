"""Rows of an export, cut anew: the same rows, wherever a store's blocks end."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, strategies as st

from arrow_tq.backend import Rows
from arrow_tq.offline.exporting import _recut


@given(data=st.data())
def test_pieces_are_the_same_rows(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))

    def cuts() -> list[int]:
        edges = data.draw(st.lists(st.integers(1, count), max_size=6, unique=True).map(sorted))
        return [0, *(edge for edge in edges if edge < count), count]

    values = np.arange(count * 2, dtype=np.int32).reshape(count, 2)
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    blocks = []
    given_cuts, wanted_cuts = cuts(), cuts()
    for first, end in itertools.pairwise(given_cuts):
        mask = valid[first:end]
        blocks.append(Rows(values[first:end], None if mask.all() else mask))
    sizes = np.diff(wanted_cuts).tolist()
    pieces = list(_recut(iter(blocks), sizes))
    assert [len(rows) for rows, _ in pieces] == sizes
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in pieces]), values)
    masks = [np.ones(len(rows), bool) if mask is None else mask for rows, mask in pieces]
    np.testing.assert_array_equal(np.concatenate(masks), valid)
