"""Interval algebra on spans and ranges: numpy throughout, no Python per span.

*Spans* are rows of ``SPAN_DTYPE``; *ranges* are ``[n, 2]`` int64, half-open. Where a function says
"ascending", starts ascend and nothing overlaps; that is also what every function here returns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.spans import Spans, empty_spans

Ranges = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]


def ends_of(spans: Spans) -> npt.NDArray[np.int64]:
    """First position after each span."""
    ends: npt.NDArray[np.int64] = spans["start"] + spans["rows"].astype(np.int64)
    return ends


def overlay(spans: Spans, policy: str) -> Spans:
    """What is visible of spans laid over one another, ascending and merged.

    Args:
        spans: in the order in which they were written; they may overlap in any way.
        policy: ``last``: a later span covers earlier ones; ``first``: an earlier one stays.
    """
    starts, ends = spans["start"], ends_of(spans)
    if not (starts[1:] < ends[:-1]).any():
        return merge(spans)
    points, places = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    first, end = places[: len(spans)], places[len(spans) :]
    order = np.arange(len(spans), dtype=np.int32)
    rank = order if policy == "last" else order[::-1]
    best = _highest(first, end, rank, len(points) - 1)
    cells = np.flatnonzero(best >= 0)
    owner = best[cells] if policy == "last" else len(spans) - 1 - best[cells]
    return merge(_cut(spans, owner, points[cells], points[cells + 1]))


def merge(spans: Spans) -> Spans:
    """Ascending spans, with neighbours that are consecutive rows of one chunk made one."""
    if len(spans) < 2:
        return spans
    before, after = spans[:-1], spans[1:]
    starts_run = np.empty(len(spans), dtype=np.bool_)
    starts_run[0] = True
    starts_run[1:] = (
        (before["high"] != after["high"])
        | (before["low"] != after["low"])
        | (ends_of(before) != after["start"])
        | (before["row"].astype(np.int64) + before["rows"] != after["row"])
    )
    heads = np.flatnonzero(starts_run)
    if len(heads) == len(spans):
        return spans
    merged = spans[heads]
    merged["rows"] = np.add.reduceat(spans["rows"].astype(np.int64), heads)
    return merged


def clip(spans: Spans, start: int, end: int) -> Spans:
    """The parts of ascending spans inside ``[start, end)``."""
    return restrict(spans, np.array([[start, end]], dtype=np.int64))


def restrict(spans: Spans, ranges: Ranges) -> Spans:
    """The parts of ascending spans inside ascending ranges."""
    if len(spans) and len(ranges) == 1:
        start, end = ranges[0].tolist()
        if start <= spans["start"][0] and ends_of(spans[-1:])[0] <= end:
            return spans
    index, starts, ends = _intersect(spans["start"], ends_of(spans), ranges)
    return _cut(spans, index, starts, ends)


def gaps(spans: Spans, ranges: Ranges) -> Ranges:
    """Holes: the parts of ``ranges`` that ascending ``spans`` leave uncovered."""
    if len(spans) == 1 and len(ranges) == 1:
        # Most fields of most segments: one chunk, and all of the domain.
        (start, end), (span,) = ranges[0].tolist(), spans[["start", "rows"]].tolist()
        if span[0] <= start and end <= span[0] + span[1]:
            return ranges[:0]
    return subtract(union(ranges), np.stack([spans["start"], ends_of(spans)], axis=1))


def domain_ranges(field: Field, num_tokens: int, sampled: Ranges) -> Ranges:
    """Positions at which ``field`` has rows in a segment of ``num_tokens`` tokens.

    Args:
        field: its domain decides: ``all`` is [0, T), ``forwarded`` [0, T-1), ``sampled`` those ranges.
        num_tokens: T.
        sampled: ranges sampled in the segment, in any order.
    """
    if field.domain == "sampled":
        return bounded(union(sampled), 0, num_tokens)
    end = num_tokens - 1 if field.domain == "forwarded" else num_tokens
    return union(np.array([[0, end]], dtype=np.int64))


def union(ranges: Ranges) -> Ranges:
    """Ranges ascending, with those that touch or overlap made one, empty ones dropped."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if len(ranges) < 2:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    heads = np.concatenate([[0], np.flatnonzero(ranges[1:, 0] > reach[:-1]) + 1])
    tails = np.concatenate([heads[1:] - 1, [len(ranges) - 1]])
    return np.stack([ranges[heads, 0], reach[tails]], axis=1)


def subtract(ranges: Ranges, taken: Ranges) -> Ranges:
    """The parts of ascending ``ranges`` outside ascending ``taken``."""
    if not len(taken) or not len(ranges):
        return union(ranges)
    lowest, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    starts = np.concatenate([[lowest], taken[:, 1]])
    ends = np.concatenate([taken[:, 0], [highest]])
    _, first, end = _intersect(starts, ends, ranges)
    return union(np.stack([first, end], axis=1))


def bounded(ranges: Ranges, start: int, end: int) -> Ranges:
    """The parts of ascending ``ranges`` inside ``[start, end)``."""
    return union(np.clip(ranges, start, end))


def _intersect(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], ranges: Ranges
) -> tuple[Indices, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Common parts of two ascending sets: index into the first, start, end."""
    first = np.searchsorted(ends, ranges[:, 0], side="right")
    last = np.searchsorted(starts, ranges[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(ranges)), counts)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = first[which] + offset
    low = np.maximum(starts[index], ranges[which, 0])
    high = np.minimum(ends[index], ranges[which, 1])
    keep = low < high
    return index[keep], low[keep], high[keep]


def _cut(
    spans: Spans, index: npt.NDArray[np.integer], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Spans:
    """Part ``[starts, ends)`` of each of ``spans[index]``."""
    if not len(index):
        return empty_spans()
    parts: Spans = spans[index]
    parts["row"] += (starts - parts["start"]).astype(np.uint32)
    parts["start"] = starts
    parts["rows"] = ends - starts
    return parts


def _highest(first: Indices, end: Indices, rank: npt.NDArray[np.int32], cells: int) -> npt.NDArray[np.int32]:
    """The highest rank among the intervals ``[first, end)`` over each cell, -1 where there is none.

    A sparse table run backwards: an interval marks two blocks of 2^k cells that together are it, and each
    level hands its marks down to its halves. O((n + cells) log cells) whatever the overlaps.
    """
    level = np.frexp((end - first).astype(np.float64))[1] - 1
    by_level = np.argsort(level, kind="stable")
    top = int(level.max())
    bounds = np.searchsorted(level[by_level], np.arange(top + 2))
    best = np.full(cells, -1, dtype=np.int32)
    for k in range(top, -1, -1):
        half = 1 << k
        if k < top:
            best[half:] = np.maximum(best[half:], best[:-half])
        chosen = by_level[bounds[k] : bounds[k + 1]]
        np.maximum.at(best, first[chosen], rank[chosen])
        np.maximum.at(best, end[chosen] - half, rank[chosen])
    return best
