"""Rows that may still change: one ring of rows a request, all rings of a field in one array.

A decode step of a whole scheduler batch is then one indexed assignment. Rows leave a ring as pieces of
``chunk_rows`` once they are behind the tail window; a piece is a copy, so nothing written can change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.recorder.rows import Narrowed, Positions
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field

SCATTER_ROWS_MAX = 32
"""Requests with more rows than this in one call are copied slice by slice, which is faster for them."""
CHUNK_ROWS_MAX = 1 << 16
"""Rows of a chunk at most, unless told: it bounds what narrow fields buffer for each request."""
NOTHING = -1


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows that are final: memory of its own, in the storage dtype."""

    slot: int
    start: int
    values: npt.NDArray[np.generic]
    """``[rows, *field.shape]``."""
    valid: npt.NDArray[np.bool_] | None


class Windows:
    """The rings of one field. Not thread-safe.

    Args:
        field: the declared field.
        slots: requests at a time.
        chunk_rows: rows of a piece.
        window_tokens: rows before a request's end that may be overwritten.
    """

    def __init__(self, field: Field, slots: int, chunk_rows: int, window_tokens: int) -> None:
        self.field = field
        self.chunk_rows = chunk_rows
        self.window_tokens = window_tokens
        self.slot_rows = chunk_rows + window_tokens
        # Pages are touched as rows come, so a short response costs what it holds.
        self._values = np.empty((slots * self.slot_rows, *field.shape), field.type.numpy)
        self._nulls = np.zeros(slots * self.slot_rows, np.bool_)
        self._has_nulls = np.zeros(slots, np.bool_)
        self._first = np.full(slots, NOTHING, np.int64)
        self._written = np.full(slots, NOTHING, np.int64)
        self._end = np.full(slots, NOTHING, np.int64)
        # First pieces differ in length by slot: requests that began together must not all write at one step.
        self._first_piece = chunk_rows - np.arange(slots) * (chunk_rows // 2) // slots
        self._piece = self._first_piece.copy()

    @property
    def buffer_bytes(self) -> int:
        """Memory that the rings take once every one of them was full."""
        return self._values.nbytes + self._nulls.nbytes

    def span(self, slot: int) -> tuple[int, int] | None:
        """First position and end of what a request recorded; None: nothing yet."""
        first = int(self._first[slot])
        return None if first == NOTHING else (first, int(self._end[slot]))

    def written(self, slot: int) -> int:
        """First position that has not left as a piece."""
        return int(self._written[slot])

    def append(
        self, slots: Positions, starts: Positions, lengths: Positions, rows: Narrowed, names: list[str]
    ) -> Iterator[Piece]:
        """Take rows of distinct requests; gives the pieces that became final.

        The iterator must be exhausted. Rows at positions that are there already replace them.

        Raises:
            InvalidInput: a start below the window's floor or beyond the request's end, or a request named
                twice; nothing was taken.
        """
        self._check(slots, starts, names)
        fresh = self._end[slots] == NOTHING
        for state in (self._first, self._written, self._end):
            state[slots[fresh]] = starts[fresh]
        ends = np.maximum(self._end[slots], starts + lengths)
        fits = (ends - self._written[slots] <= self.slot_rows).all()
        if fits and lengths.max(initial=0) <= SCATTER_ROWS_MAX:
            self._scatter(slots, starts, lengths, rows)
            self._end[slots] = ends
            for slot in slots[
                ends - self._written[slots] >= self._piece[slots] + self.window_tokens
            ].tolist():
                yield self._leave_next(slot)
            return
        row = 0
        for slot, start, count in zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            nulls = None if rows.nulls is None else rows.nulls[row : row + count]
            yield from self._append_one(slot, start, rows.values[row : row + count], nulls)
            row += count

    def rest(self, slot: int, end: int) -> Iterator[Piece]:
        """What has not left yet of the rows before ``end``, in equal pieces."""
        left = end - self.written(slot)
        count = -(-left // self.chunk_rows) if left > 0 else 0
        for number in range(count):
            yield self._leave(slot, left * (number + 1) // count - left * number // count)

    def free(self, slot: int) -> None:
        """Forget a request's rows."""
        for state in (self._first, self._written, self._end):
            state[slot] = NOTHING
        self._piece[slot] = self._first_piece[slot]
        if self._has_nulls[slot]:
            self._nulls[slot * self.slot_rows : (slot + 1) * self.slot_rows] = False
            self._has_nulls[slot] = False

    # -- inside --------------------------------------------------------------------------------

    def _check(self, slots: Positions, starts: Positions, names: list[str]) -> None:
        ends = self._end[slots]
        known = ends != NOTHING
        floors = np.maximum(self._first[slots], ends - self.window_tokens)
        wrong = known & ((starts < floors) | (starts > ends))
        if wrong.any():
            index = int(np.flatnonzero(wrong)[0])
            start, floor, end = int(starts[index]), int(floors[index]), int(ends[index])
            what = f"request {names[index]!r}, field {self.field.name!r}: start {start} is"
            if start > end:
                raise InvalidInput(f"{what} beyond the end {end}: rows must follow one another", start=start)
            raise InvalidInput(
                f"{what} below the window's floor {floor} (of rows up to {end} the last "
                f"{self.window_tokens} may be overwritten)",
                start=start,
                floor=floor,
            )
        if len(slots) > 1 and len(np.unique(slots)) != len(slots):
            raise InvalidInput(f"field {self.field.name!r}: a request named twice in one batch: {names[:8]}")

    def _scatter(self, slots: Positions, starts: Positions, lengths: Positions, rows: Narrowed) -> None:
        """All rows at once."""
        if (lengths == 1).all():
            places = slots * self.slot_rows + starts % self.slot_rows
        else:
            within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            positions = np.repeat(starts, lengths) + within
            places = np.repeat(slots * self.slot_rows, lengths) + positions % self.slot_rows
        self._values[places] = rows.values
        if rows.nulls is not None and rows.nulls.any():
            self._has_nulls[np.repeat(slots, lengths)[rows.nulls]] = True
        if self._has_nulls[slots].any():
            self._nulls[places] = False if rows.nulls is None else rows.nulls

    def _append_one(
        self,
        slot: int,
        start: int,
        values: npt.NDArray[np.generic],
        nulls: npt.NDArray[np.bool_] | None,
    ) -> Iterator[Piece]:
        if nulls is not None and nulls.any():
            self._has_nulls[slot] = True
        row = 0
        while row < len(values):
            position = start + row
            count = min(self.written(slot) + self.slot_rows - position, len(values) - row)
            for place, ring in self._ring(slot, position, count):
                part = slice(row + place, row + place + ring.stop - ring.start)
                self._values[ring] = values[part]
                if self._has_nulls[slot]:
                    self._nulls[ring] = False if nulls is None else nulls[part]
            row += count
            self._end[slot] = max(int(self._end[slot]), start + row)
            while self._end[slot] - self._written[slot] >= self._piece[slot] + self.window_tokens:
                yield self._leave_next(slot)

    def _leave_next(self, slot: int) -> Piece:
        piece = self._leave(slot, int(self._piece[slot]))
        self._piece[slot] = self.chunk_rows
        return piece

    def _leave(self, slot: int, count: int) -> Piece:
        """The next ``count`` rows as a piece."""
        start = self.written(slot)
        values = np.empty((count, *self.field.shape), self._values.dtype)
        nulls = np.zeros(count, np.bool_)
        for place, ring in self._ring(slot, start, count):
            part = slice(place, place + ring.stop - ring.start)
            values[part] = self._values[ring]
            if self._has_nulls[slot]:
                nulls[part] = self._nulls[ring]
        self._written[slot] += count
        return Piece(slot, start, values, ~nulls if nulls.any() else None)

    def _ring(self, slot: int, position: int, count: int) -> Iterator[tuple[int, slice]]:
        """Where ``count`` rows from ``position`` are: at most two (row, slice of the array)."""
        base, offset = slot * self.slot_rows, position % self.slot_rows
        first = min(count, self.slot_rows - offset)
        if first:
            yield 0, slice(base + offset, base + offset + first)
        if count > first:
            yield first, slice(base, base + count - first)
