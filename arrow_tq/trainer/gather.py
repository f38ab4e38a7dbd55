"""What to read for rows that are wanted in places, and where what was read goes: each row is read once."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.parallel import portions
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans, empty_spans

FEW_RUNS = 8
"""So few are placed one by one, whatever their length."""
WALKED_MAX = 1 << 16
"""Short runs up to this many are kept as Python numbers, so that small blocks cost little."""
RUN_ROWS_MIN = 16
"""Runs shorter than this on average are placed by an index of rows, not one by one."""
_LINE_BITS = 33
"""Rows of a chunk are fewer than 2^32, so chunk number and row make one ascending line."""

Places = npt.NDArray[np.int64]
Run = tuple[int, int, int]
"""First row in a block, first row in the buffer, rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where rows go: ``spans[i]`` fills ``out[places[i] : places[i] + rows]``. Spans may overlap."""

    spans: Spans
    places: Places


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A placement as one read.

    Attributes:
        spans: what to read, ascending by chunk and row; each row of a chunk once.
        sources: ``[runs]`` row of the answer at which each run begins, ascending.
        places: ``[runs]`` where in the buffer it goes.
        counts: ``[runs]`` its rows.
    """

    spans: Spans
    sources: Places
    places: Places
    counts: Places
    _reach: Places

    @classmethod
    def of(cls, placement: Placement) -> Gather:
        """Sorts the spans, and reads what several of them share once."""
        if not len(placement.spans):
            nothing = np.empty(0, np.int64)
            return cls(empty_spans(), nothing, nothing, nothing, nothing)
        order = np.lexsort([placement.spans[name] for name in ("row", "low", "high")])
        spans, places = placement.spans[order], placement.places[order]
        counts = spans["rows"].astype(np.int64)
        starts = chunk_numbers(spans) << _LINE_BITS | spans["row"].astype(np.int64)
        reach = np.maximum.accumulate(starts + counts)
        heads = np.concatenate([[0], np.flatnonzero(starts[1:] > reach[:-1]) + 1])
        tails = np.concatenate([heads[1:], [len(spans)]]) - 1
        wanted = np.empty(len(heads), SPAN_DTYPE)
        for name in ("start", "high", "low", "row"):
            wanted[name] = spans[name][heads]
        rows = reach[tails] - starts[heads]
        wanted["rows"] = rows
        shift = np.repeat(np.cumsum(rows) - rows - starts[heads], tails - heads + 1)
        sources = starts + shift
        return cls(wanted, sources, places, counts, np.maximum.accumulate(sources + counts))

    @property
    def rows(self) -> int:
        """Rows of the answer."""
        return int(self.spans["rows"].sum(dtype=np.int64))

    def parts(self, count: int) -> list[Gather]:
        """The same read as so many (or fewer) of about equal size, cut between spans."""
        ends = np.cumsum(self.spans["rows"], dtype=np.int64)
        cuts = portions(self.spans["rows"], count)
        if len(cuts) == 1:
            return [self]
        parts = []
        for first, end in cuts:
            begin, stop = int(ends[first - 1]) if first else 0, int(ends[end - 1])
            low, high = np.searchsorted(self.sources, [begin, stop]).tolist()
            parts.append(
                Gather(
                    *(self.spans[first:end], self.sources[low:high] - begin, self.places[low:high]),
                    *(self.counts[low:high], self._reach[low:high] - begin),
                )
            )
        return parts

    def position(self, row: int) -> int:
        """Token position of a row of the answer."""
        ends = np.cumsum(self.spans["rows"], dtype=np.int64)
        index = int(np.searchsorted(ends, row, side="right"))
        first = int(ends[index]) - int(self.spans["rows"][index])
        return int(self.spans["start"][index]) + row - first

    def block(self, first: int, end: int) -> Block:
        """Where rows ``[first, end)`` of the answer go."""
        low = int(np.searchsorted(self._reach, first, side="right"))
        high = int(np.searchsorted(self.sources, end, side="left"))
        sources, counts = self.sources[low:high], self.counts[low:high]
        begins, ends = np.maximum(sources, first), np.minimum(sources + counts, end)
        places = self.places[low:high] + (begins - sources)
        keep = begins < ends
        return Block(begins[keep] - first, places[keep], (ends - begins)[keep])


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Where the rows of one block go: ``sources`` counts in the block."""

    sources: Places
    places: Places
    counts: Places

    @property
    def is_scattered(self) -> bool:
        """Whether runs are so short that rows are better indexed."""
        return int(self.counts.sum()) < RUN_ROWS_MIN * len(self.counts)

    def runs(self) -> Iterator[Run]:
        """Run by run."""
        yield from zip(self.sources.tolist(), self.places.tolist(), self.counts.tolist(), strict=True)

    def indices(self) -> tuple[Places, Places]:
        """Row in the block, and row in the buffer, of every row."""
        offsets = np.arange(int(self.counts.sum())) - np.repeat(
            np.cumsum(self.counts) - self.counts, self.counts
        )
        return (
            np.repeat(self.sources, self.counts) + offsets,
            np.repeat(self.places, self.counts) + offsets,
        )


class Cursor:
    """Says block by block, in the order of the answer, where rows go."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._at = 0
        self._runs: list[Run] = []
        self._sources: list[int] = []
        count = len(gather.sources)
        apart = bool((gather.sources[1:] >= gather._reach[:-1]).all())
        self._walks = apart and (count <= WALKED_MAX or gather.rows >= RUN_ROWS_MIN * count)
        if self._walks:
            self._sources = gather.sources.tolist()
            self._runs = list(zip(self._sources, gather.places.tolist(), gather.counts.tolist(), strict=True))

    def runs(self, first: int, end: int) -> list[Run] | None:
        """The runs of rows ``[first, end)`` of the answer; None where they are better indexed."""
        if not self._walks:
            block = self._gather.block(first, end)
            return None if block.is_scattered else list(block.runs())
        high = bisect.bisect_left(self._sources, end, self._at)
        found = self._runs[self._at : high]
        if found and found[-1][0] + found[-1][2] > end:
            # The rest of it is in the next block.
            high -= 1
        self._at = high
        if len(found) > FEW_RUNS and end - first < RUN_ROWS_MIN * len(found):
            return None
        return [_clipped(run, first, end) for run in found]


def _clipped(run: Run, first: int, end: int) -> Run:
    source, place, count = run
    begin, stop = max(source, first), min(source + count, end)
    return begin - first, place + begin - source, stop - begin


def chunk_numbers(spans: Spans) -> Places:
    """A number for each span's chunk, counting up from 0; spans are ascending by chunk."""
    changes = (spans["high"][1:] != spans["high"][:-1]) | (spans["low"][1:] != spans["low"][:-1])
    return np.concatenate([[0], np.cumsum(changes)]).astype(np.int64)
