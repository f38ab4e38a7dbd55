"""Handles, and plans: work on metadata alone, against the bound of one second."""

from __future__ import annotations

import numpy as np

from arrow_tq.trainer.packing import PlanPolicy, pack
from arrow_tq_schemas import handles
from arrow_tq_schemas.spans import SPAN_DTYPE
from benchmarks.report import Row, against, interleaved, rate
from benchmarks.sizes import Sizes

SPAN_ROWS = 1000
"""Rows of one span: a turn of an agent."""
CP = 8
SEGMENTS, RANKS = 40_000, 64
BOUND_S = 1.0


def rows(sizes: Sizes) -> list[Row]:
    """Expand and group; grouping what a context-parallel split left too, and as int64."""
    count = sizes.handles
    spans = _spans(count)
    made = handles.expand(spans)
    split = _zigzagged(made)
    wide = split.astype(np.int64)
    tokens = np.random.default_rng(0).integers(100, 60_000, SEGMENTS)
    expanded, grouped, zigzagged, promoted, planned = interleaved(
        sizes.rounds,
        [
            lambda: rate(count, lambda: handles.expand(spans)),
            lambda: rate(count, lambda: handles.group(made)),
            lambda: rate(count, lambda: handles.group(split)),
            lambda: rate(count, lambda: handles.group(wide)),
            lambda: rate(SEGMENTS, lambda: pack(tokens, RANKS, 65_536, 1, PlanPolicy())),
        ],
    )
    bound = count / BOUND_S
    return [
        against("expand handles, to all of them in 1 s", expanded, bound, "handles/s", 1.0),
        against("group handles, to all of them in 1 s", grouped, bound, "handles/s", 1.0),
        against("group handles after a zig-zag split, to the same", zigzagged, bound, "handles/s", 1.0),
        against("group handles promoted to int64, to the same", promoted, bound, "handles/s", 1.0),
        against("plan 40,000 segments for 64 ranks, to 1 s", planned, SEGMENTS / BOUND_S, "segments/s", 1.0),
    ]


def _spans(count: int) -> np.ndarray:
    random = np.random.default_rng(0)
    spans = np.zeros(count // SPAN_ROWS, SPAN_DTYPE)
    spans["high"] = random.integers(0, 1 << 63, len(spans))
    spans["low"] = random.integers(0, 1 << 63, len(spans))
    spans["row"] = random.integers(0, 1 << 16, len(spans))
    spans["rows"] = SPAN_ROWS
    return spans


def _zigzagged(made: np.ndarray) -> np.ndarray:
    """Every sample of 10,000 rows split for 8 ranks, one rank's parts after another's."""
    part = 10_000 // (2 * CP)
    whole = made[: len(made) // 10_000 * 10_000].reshape(-1, 10_000, 6)
    parts = [
        whole[:, at * part : (at + 1) * part].reshape(-1, 6)
        for rank in range(CP)
        for at in (rank, 2 * CP - 1 - rank)
    ]
    return np.concatenate(parts)
