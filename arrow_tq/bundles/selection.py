"""Which fields, which rows and in which form a bundle is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles.structure import Block, FieldLayout, Structure
from arrow_tq_schemas.errors import InvalidInput, NotFound

RowType = Literal["numpy", "torch"]
ROW_TYPES = ("numpy", "torch")
RowIndices = Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice | range
Rows = RowIndices | RowType | None


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """``indices``: samples in the order wanted, None for all; ``row_type`` None: rows as they were put."""

    indices: npt.NDArray[np.int64] | None
    row_type: RowType | None


@dataclass(frozen=True, slots=True)
class Part:
    """A block, and the number of its first row in its field."""

    first: int
    block: Block


def select(structure: Structure, rows: Rows, row_type: str | None) -> Selection:
    """What ``rows=`` and ``row_type=`` say; a word as ``rows`` is the row type of all rows.

    Raises:
        InvalidInput: an unknown row type, or no indices; a row that is not there.
    """
    if isinstance(rows, str):
        if row_type is not None and row_type != rows:
            raise InvalidInput(f"rows={rows!r} and row_type={row_type!r} say different things")
        rows, row_type = None, rows
    if row_type is not None and row_type not in ROW_TYPES:
        raise InvalidInput(f"row type {row_type!r}: expected one of {', '.join(ROW_TYPES)}")
    indices = None if rows is None else _indices(rows, structure.rows)
    return Selection(indices, cast("RowType | None", row_type))


def chosen_fields(structure: Structure, names: Sequence[object] | None, keys: Sequence[object]) -> list[int]:
    """Positions of the fields of these names, in the bundle's order; None: all."""
    if names is None:
        return list(range(len(keys)))
    wanted = [names] if isinstance(names, str) else list(names)
    missing = [name for name in wanted if name not in keys]
    if missing:
        known = ", ".join(map(str, keys[:40]))
        raise NotFound(f"the bundle has no field {missing[0]!r}; it has {known}", field=str(missing[0]))
    return [index for index, key in enumerate(keys) if key in wanted]


def parts_of(field: FieldLayout, buffer: str, indices: npt.NDArray[np.int64] | None) -> list[Part]:
    """The blocks of a buffer that hold these rows (None: all), in order."""
    parts = []
    first = 0
    for block in field.buffers.get(buffer, ()):
        # Blocks with no rows go on with the row before them.
        parts.append(Part(first if block.rows or not first else first - 1, block))
        first += block.rows
    if indices is None:
        return parts
    if not len(indices):
        return []
    wanted = np.zeros(first + 1, np.int64)
    wanted[indices + 1] = 1
    counts = np.cumsum(wanted)
    return [part for part in parts if counts[part.first + max(part.block.rows, 1)] > counts[part.first]]


def _indices(rows: RowIndices, count: int) -> npt.NDArray[np.int64]:
    if isinstance(rows, slice):
        return np.arange(count, dtype=np.int64)[rows]
    if isinstance(rows, range):
        rows = list(rows)
    try:
        asked = np.asarray(rows)
    except (TypeError, ValueError):
        raise InvalidInput(f"rows {rows!r}: expected indices of samples") from None
    if asked.dtype == np.bool_:
        if asked.shape != (count,):
            raise InvalidInput(f"rows: a mask of shape {asked.shape}, the bundle has {count} samples")
        return np.flatnonzero(asked).astype(np.int64)
    if asked.size == 0:
        return np.empty(0, np.int64)
    if asked.ndim != 1 or asked.dtype.kind not in "iu":
        raise InvalidInput(
            f"rows of dtype {asked.dtype} and shape {asked.shape}: expected indices of samples"
        )
    indices = asked.astype(np.int64)
    wrong = (indices < -count) | (indices >= count)
    if wrong.any():
        raise InvalidInput(f"row {int(indices[wrong][0])}: the bundle has {count} samples", rows=count)
    return np.where(indices < 0, indices + count, indices)
