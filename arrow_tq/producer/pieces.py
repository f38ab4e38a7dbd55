"""Rows that came in pieces: arrays one behind the other, stored as if they were one."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.producer.arrays import Source, as_source
from arrow_tq.producer.filling import BLOCK_BYTES
from arrow_tq_schemas.errors import InvalidField
from arrow_tq_schemas.fields import Field

Values = npt.NDArray[np.generic]


class Pieces:
    """What a ``Source`` is, over several arrays of one dtype without null rows: joined a block at a time."""

    def __init__(self, arrays: Sequence[Values], dtype: str) -> None:
        self.dtype = dtype
        self._arrays = arrays
        self._ends = list(itertools.accumulate(map(len, arrays)))

    def __len__(self) -> int:
        return self._ends[-1]

    def has_nulls(self, first: int, end: int) -> bool:
        """Never: what can have any is no numpy array and no tensor."""
        return False

    def part(self, first: int, end: int) -> Source:
        """Rows ``[first, end)`` as one array."""
        return Source(np.concatenate(list(self._within(first, end))), None, self.dtype, True)

    def blocks(self, first: int, end: int) -> Iterator[Values]:
        """The same in as few arrays as are worth joining: each stays in the processor's cache."""
        block: list[Values] = []
        size = 0
        for rows in self._within(first, end):
            if block and size + rows.nbytes > BLOCK_BYTES:
                yield _joined(block)
                block, size = [], 0
            block.append(rows)
            size += rows.nbytes
        if block:
            yield _joined(block)

    def _within(self, first: int, end: int) -> Iterator[Values]:
        for index in range(bisect_right(self._ends, first), len(self._ends)):
            before = self._ends[index] - len(self._arrays[index])
            if before >= end:
                return
            if before < self._ends[index]:
                yield self._arrays[index][max(first - before, 0) : end - before]


def as_rows(field: Field, array: object, start: int) -> Source | Pieces:
    """As ``as_source``; also of a list of arrays, each of rows.

    Raises:
        InvalidField: as ``as_source``; or the arrays are of different dtypes; names both.
    """
    if not (isinstance(array, list | tuple) and array and _is_rows(field, array[0])):
        return as_source(field, array, start)
    sources: list[Source] = []
    for piece in array:
        sources.append(as_source(field, piece, start))
        start += len(sources[-1])
    dtype = sources[0].dtype
    if (other := next((one.dtype for one in sources if one.dtype != dtype), None)) is not None:
        raise InvalidField(f"field {field.name!r}: arrays of {dtype} and of {other} in one put")
    return Pieces([one.values for one in sources], dtype)


def _is_rows(field: Field, item: object) -> bool:
    """Whether an item of a list is an array of rows (numpy's or torch's), and not a row itself."""
    return getattr(item, "ndim", None) == 1 + len(field.shape)


def _joined(block: Sequence[Values]) -> Values:
    return block[0] if len(block) == 1 else np.concatenate(block)
