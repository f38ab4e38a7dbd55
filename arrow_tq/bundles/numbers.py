"""Rows of Python numbers out of one flat array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

KNOWN = range(-5, 257)
"""Ints that Python has already, and does not make anew."""
AGAIN = 4
"""Times that each number there could be occurs on average, from which on each is made once."""
STRETCH = 1 << 17
"""Elements that are looked up at a time: what a processor's own cache holds, with their pointers."""

Flat = npt.NDArray[np.number]


class NumberLists:
    """Makes lists of the numbers of one field.

    Token ids are few and occur often: each becomes one object that all rows share, as small ints are for
    Python itself. Making objects costs less than the memory that they fill: 32 bytes each, always fresh.

    Args:
        parts: all values that rows are made of.
    """

    def __init__(self, parts: Sequence[Flat]) -> None:
        self._table = _table(parts)

    def rows(self, flat: Flat, ends: Sequence[int]) -> Iterator[list[object]]:
        """A list for each row of one part; ``ends`` are the rows' borders, from 0."""
        if self._table is None:
            for first, end in pairwise(ends):
                yield flat[first:end].tolist()
            return
        row = 0
        while row < len(ends) - 1:
            until = max(int(np.searchsorted(ends, ends[row] + STRETCH, side="right")) - 1, row + 1)
            begin = ends[row]
            objects = self._table[flat[begin : ends[until]]]
            for first, end in pairwise(ends[row : until + 1]):
                yield objects[first - begin : end - begin].tolist()
            row = until


def _table(parts: Sequence[Flat]) -> npt.NDArray[np.object_] | None:
    """Every int from 0 to the largest there is; None where that is not worth while."""
    count = sum(map(len, parts))
    if not count or parts[0].dtype.kind != "i":
        return None
    lowest = min(int(part.min()) for part in parts if len(part))
    highest = max(int(part.max()) for part in parts if len(part))
    if lowest < 0 or highest in KNOWN or (highest + 1) * AGAIN > count:
        return None
    return np.arange(highest + 1).astype(object)
