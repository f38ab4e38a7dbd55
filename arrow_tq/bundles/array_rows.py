"""Rows that are arrays or tensors of one dtype: looked at a block at a time, right before they are gathered.

The heads of many small arrays lie scattered, each beside its values: a pass over all of them misses the
caches at every one. Whoever gathers right after looking misses once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles import plans, tensors_io
from arrow_tq.bundles.plans import (
    BlockPlan,
    Buffers,
    Bytes,
    LayoutMiss,
    Sizes,
    array_blocks,
    as_bytes,
    columns_of,
    cut_row,
    is_cut,
)
from arrow_tq_schemas.errors import InvalidInput

AHEAD = "ahead"
"""Hint for a field whose rows turned out mixed: all of them are looked at before any is written."""
AHEAD_ROWS = 256
"""So many of the first, and so many spread over the rest, are looked at ahead in any case."""
AHEAD_ROW_BYTES = 16 << 10
"""Larger rows are all looked at ahead: that costs little beside gathering them, gathering in vain much."""
STRETCH_ROWS_MAX = 1 << 15
_NOTHING = type(None)
_dtype_of, _ndim_of, _shape_of = attrgetter("dtype"), attrgetter("ndim"), attrgetter("shape")


class ArrayRows:
    """A list of arrays, or of tensors, and None between them; those that were looked at with their shapes.

    Args:
        name: the field.
        rows: the list.
        some: one of the rows, which all others have to be like.
        item_bytes: of one element.
    """

    def __init__(self, name: str, rows: Sequence[object], some: object, item_bytes: int) -> None:
        self._name = name
        self._rows = rows
        self._kind = type(some)
        self._dtype = _dtype_of(some)
        self._ndim: int = _ndim_of(some)
        self._item_bytes = item_bytes
        numpy = self._kind is np.ndarray
        self._native = numpy and self._dtype.isnative and self._dtype.kind in "biufc"
        self._elements: Sizes = np.zeros(len(rows), np.int64)
        self._ends: Sizes = np.zeros(len(rows) + 1, np.int64)
        """Elements of all rows before each, as far as they were looked at."""
        self._shapes: Sizes = np.zeros((len(rows) if self._ndim != 1 else 0, self._ndim), np.int64)
        self._valid: npt.NDArray[np.bool_] | None = None
        self._looked = 0

    @property
    def all_looked_at(self) -> bool:
        return self._looked == len(self._rows)

    @property
    def _looked_bytes(self) -> int:
        return int(self._ends[self._looked]) * self._item_bytes

    def look_ahead(self, at_all: bool) -> None:
        """Look at some rows, at all where asked, or where they are large. Raises ``LayoutMiss``."""
        count = len(self._rows)
        if not at_all:
            self._check(self._rows[:: -(-count // AHEAD_ROWS)])
            self._look(min(count, AHEAD_ROWS))
            at_all = self._looked_bytes >= self._looked * AHEAD_ROW_BYTES
        if at_all:
            self._check(self._rows)
            self._look(count)

    def blocks(self) -> Iterator[BlockPlan]:
        """Blocks of whole rows, which are looked at when it is their turn. Raises ``LayoutMiss``."""
        first = 0
        while first < len(self._rows):
            end = self._block_end(first)
            nbytes = int(self._ends[end] - self._ends[first]) * self._item_bytes
            rows = self._rows[first:end]
            cut = is_cut(nbytes, end - first)
            if cut or not nbytes:
                # Not gathered as a whole, so nothing else checks them.
                self._check(rows)
            if cut:
                yield from cut_row(nbytes, partial(self._write_part, first))
            else:
                yield BlockPlan(nbytes, end - first, partial(self._gather, rows))
            first = end

    def sides(self, meta: dict[str, object]) -> Buffers:
        """What is beside the values, once all rows were looked at; into ``meta`` what is one number."""
        buffers: Buffers = {}
        if self._valid is not None:
            buffers["valid"] = array_blocks(self._valid)
        if self._ndim == 1:
            found, lengths = columns_of(self._elements)
            meta.update(found)
            return buffers | lengths
        if self._valid is None and (self._shapes == self._shapes[0]).all():
            meta["shape"] = self._shapes[0].tolist()
        else:
            buffers["shapes"] = array_blocks(self._shapes) if self._ndim else []
        return buffers

    def _block_end(self, first: int) -> int:
        """Past the last row of the block that begins with ``first``."""
        goal = int(self._ends[first]) + plans.BLOCK_BYTES // self._item_bytes
        while True:
            end = int(np.searchsorted(self._ends[: self._looked + 1], goal, side="right")) - 1
            if end < self._looked or self.all_looked_at:
                return max(end, first + 1)
            missing = (goal - int(self._ends[self._looked])) * self._item_bytes
            # A few more than it takes if they are as long as those before.
            stretch = missing * self._looked // max(self._looked_bytes, 1) + 16
            self._look(min(self._looked + min(stretch, STRETCH_ROWS_MAX), len(self._rows)))

    def _look(self, end: int) -> None:
        """Look at the types and shapes of the rows up to ``end``."""
        first = self._looked
        rows, where = self._rows[first:end], slice(first, end)
        kinds = set(map(type, rows))
        if kinds - {self._kind, _NOTHING}:
            raise self._miss()
        places: slice | npt.NDArray[np.int64] = where
        if _NOTHING in kinds:
            if self._valid is None:
                self._valid = np.ones(len(self._rows), np.bool_)
            self._valid[where] = [row is not None for row in rows]
            places = first + np.flatnonzero(self._valid[where])
        self._elements[places] = self._counted(self._present(rows), places)
        ends = self._ends[first + 1 : end + 1]
        np.cumsum(self._elements[where], out=ends)
        ends += self._ends[first]
        self._looked = end

    def _counted(self, present: Sequence[object], places: slice | npt.NDArray[np.int64]) -> Sizes:
        """Elements of each of these rows; keeps their shapes where they have more than a length."""
        if self._ndim == 1:
            try:
                return np.fromiter(map(len, present), np.int64, len(present))  # type: ignore[arg-type]
            except TypeError:
                # Of no dimensions.
                raise self._miss() from None
        shapes = list(map(_shape_of, present))
        if set(map(len, shapes)) - {self._ndim}:
            raise self._miss()
        table = np.array(shapes, np.int64).reshape(len(present), self._ndim)
        self._shapes[places] = table
        elements: Sizes = table.prod(axis=1, dtype=np.int64)
        return elements

    def _check(self, rows: Sequence[object]) -> None:
        """All that rows have to share."""
        present = [row for row in rows if row is not None]
        if (
            set(map(type, present)) - {self._kind}
            or set(map(_dtype_of, present)) - {self._dtype}
            or set(map(_ndim_of, present)) - {self._ndim}
        ):
            raise self._miss()

    def _gather(self, rows: Sequence[object], out: Bytes) -> None:
        parts = self._present(rows)
        if not self._native:
            # Byte order, records, times, tensors: as they lie in memory.
            self._check(parts)
            np.concatenate([self._bytes_of(row) for row in parts], out=out)
            return
        if self._ndim != 1:
            parts = [row.reshape(-1) for row in parts]  # type: ignore[attr-defined]
        try:
            # It refuses other dtypes and ranks: a pass of ours over all rows would be one more.
            np.concatenate(parts, out=out.view(self._dtype), casting="no")  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise self._miss() from None

    def _write_part(self, index: int, low: int, high: int, out: Bytes) -> None:
        np.copyto(out, self._bytes_of(self._rows[index])[low:high])

    def _bytes_of(self, row: object) -> Bytes:
        if isinstance(row, np.ndarray):
            return as_bytes(row)
        try:
            return tensors_io.as_bytes(row)
        except InvalidInput as error:
            index = next(index for index, one in enumerate(self._rows) if one is row)
            path = f"{self._name}[{index}]"
            raise InvalidInput(f"{path}: {error.message}", path=path) from None

    def _present(self, rows: Sequence[object]) -> Sequence[object]:
        """Those of looked at rows that are not None."""
        return rows if self._valid is None else [row for row in rows if row is not None]

    def _miss(self) -> LayoutMiss:
        return LayoutMiss(self._name, AHEAD)
