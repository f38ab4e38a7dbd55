"""What is to be written: buffers cut into blocks of whole rows, each with a function that fills it in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Sizes = npt.NDArray[np.int64]
Fill = Callable[[Bytes], None]
"""Writes a block into the memory it is given, all of it."""

BLOCK_BYTES = 1 << 20
"""Aimed size of a block: what a processor's own cache holds while it is gathered and hashed."""
BLOCK_BYTES_MAX = 48 << 20
"""A row larger than this is cut into several blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """Whole rows of a buffer, ``nbytes`` of them, and what writes them in their place."""

    nbytes: int
    rows: int
    fill: Fill


Buffers = dict[str, list[BlockPlan]]


@dataclass(slots=True, eq=False)
class FieldPlan:
    """One field, looked at and not copied yet. Attributes as in ``FieldLayout``.

    A buffer's blocks may be made while they are taken: then some rows were not looked at yet.
    """

    key: object
    name: str
    """What people call it: in errors and in SQL."""
    layout: str
    count: int
    sequence: bool
    """Whether the value is a sequence of ``count`` rows."""
    meta: dict[str, object] = field(default_factory=dict)
    buffers: dict[str, Iterable[BlockPlan]] = field(default_factory=dict)
    late: Callable[[], Buffers] | None = None
    """Buffers that are known when all blocks of ``buffers`` were taken; completes ``meta``."""


class LayoutMiss(Exception):
    """A block's values are not what the first of them promised: plan the field again. Ours alone.

    Attributes:
        name: the field.
        instead: hint for the planner, see ``infer``.
    """

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(name)
        self.name = name
        self.instead = instead


def ranges(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Rows in ranges of about ``BLOCK_BYTES``, never less than a row."""
    ends = np.cumsum(sizes, dtype=np.int64)
    first, before = 0, 0
    while first < len(sizes):
        end = max(int(np.searchsorted(ends, before + BLOCK_BYTES, side="right")), first + 1)
        yield first, end
        first, before = end, int(ends[end - 1])


def row_blocks(
    sizes: Sizes,
    write: Callable[[int, int, Bytes], None],
    row: Callable[[int], Bytes] | None = None,
    part: Callable[[int, int, int, Bytes], None] | None = None,
) -> list[BlockPlan]:
    """Blocks of ragged rows.

    Args:
        sizes: bytes of each row.
        write: writes rows ``[first, end)`` back to back.
        row: all bytes of one row; only asked for rows larger than a block may be.
        part: writes bytes ``[low, high)`` of a row; where there is no ``row``.
    """
    write_part = part if part is not None else partial(_write_part, row)
    blocks: list[BlockPlan] = []
    for first, end in ranges(sizes):
        nbytes = int(sizes[first:end].sum())
        if is_cut(nbytes, end - first):
            blocks += cut_row(nbytes, partial(write_part, first))
        else:
            blocks.append(BlockPlan(nbytes, end - first, partial(write, first, end)))
    return blocks


def is_cut(nbytes: int, rows: int) -> bool:
    """Whether a block of so many rows is one row that is larger than a block may be."""
    return nbytes > BLOCK_BYTES_MAX and rows == 1


def cut_row(nbytes: int, write: Callable[[int, int, Bytes], None]) -> Iterator[BlockPlan]:
    """Blocks of one row; ``write`` writes bytes ``[low, high)`` of it."""
    for low in range(0, nbytes, BLOCK_BYTES_MAX):
        high = min(low + BLOCK_BYTES_MAX, nbytes)
        yield BlockPlan(high - low, int(low == 0), partial(write, low, high))


def array_blocks(values: npt.NDArray[np.generic]) -> list[BlockPlan]:
    """Blocks of an array that is there already, contiguous: a row is an element of its first axis."""
    flat = as_bytes(values)
    rows = len(values)
    if not rows or not len(flat):
        return [BlockPlan(0, rows, _nothing)] if rows else []
    width = len(flat) // rows
    if width > BLOCK_BYTES_MAX:
        return row_blocks(
            np.full(rows, width, np.int64),
            lambda first, end, out: np.copyto(out, flat[first * width : end * width]),
            lambda index: flat[index * width : (index + 1) * width],
        )
    step = max(BLOCK_BYTES // width, 1)
    parts = [flat[first * width : (first + step) * width] for first in range(0, rows, step)]
    return [BlockPlan(len(part), len(part) // width, partial(_copied, part)) for part in parts]


def as_bytes(values: npt.NDArray[np.generic]) -> Bytes:
    """An array's values in C order as bytes: a view where it is contiguous."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


def _write_part(row: Callable[[int], Bytes] | None, index: int, low: int, high: int, out: Bytes) -> None:
    assert row is not None
    np.copyto(out, row(index)[low:high])


def _copied(part: Bytes, out: Bytes) -> None:
    np.copyto(out, part)


def _nothing(out: Bytes) -> None:
    """A block without bytes."""


def columns_of(lengths: Sequence[int] | Sizes, name: str = "lengths") -> tuple[dict[str, object], Buffers]:
    """Row lengths as a number (all equal) in ``meta``, or as a buffer."""
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) and (sizes == sizes[0]).all():
        return {name: int(sizes[0])}, {}
    return {}, {name: array_blocks(sizes)}
