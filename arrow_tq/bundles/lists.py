"""Rows that are Python lists of numbers: one flat buffer, the type of every element checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles import marshalled
from arrow_tq.bundles.plans import (
    Bytes,
    FieldPlan,
    LayoutMiss,
    array_blocks,
    as_bytes,
    columns_of,
    row_blocks,
)

Rows = Sequence[list[object] | None]

INT32, INT64, FLOAT, BOOL = "int32", "int64", "float", "bool"
DTYPES = {INT32: "<i4", INT64: "<i8", FLOAT: "<f8", BOOL: "|b1"}
_ELEMENTS = {int: INT32, float: FLOAT, bool: BOOL}
OBJECTS = "objects"


def plan_rows(plan: FieldPlan, rows: Rows, present: Sequence[list[object]], hint: str | None) -> bool:
    """Plan a list of lists of numbers, None between them; False where the first element is none.

    The types of all elements are checked when they are written: ``LayoutMiss`` then.
    """
    element = hint if hint in DTYPES else next((_ELEMENTS.get(type(row[0])) for row in present if row), None)
    if element not in DTYPES:
        return False
    plan.layout = "lists"
    plan.meta = {"element": element.removesuffix("32").removesuffix("64"), "dtype": DTYPES[element]}
    if len(present) == len(rows):
        lengths = np.fromiter(map(len, present), np.int64, len(present))
    else:
        lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
        plan.buffers["valid"] = array_blocks(
            np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        )
    meta, buffers = columns_of(lengths)
    plan.meta.update(meta)
    plan.buffers.update(buffers)
    dtype = np.dtype(DTYPES[element])
    source = _Lists(plan.name, rows, element, dtype)
    plan.buffers["values"] = row_blocks(lengths * dtype.itemsize, source.write, source.row)
    return True


class _Lists:
    def __init__(
        self,
        name: str,
        rows: Rows,
        element: str,
        dtype: np.dtype[np.generic],
    ) -> None:
        self._name = name
        self._rows = rows
        self._element = element
        self._dtype = dtype

    def write(self, first: int, end: int, out: Bytes) -> None:
        rows = [row for row in self._rows[first:end] if row is not None]
        flat = out.view(self._dtype)
        match self._element:
            case "int32":
                self._write_int32(rows, flat)
            case "float":
                self._write_floats(rows, flat)
            case "int64":
                self._write_checked(rows, flat, int)
            case _:
                self._write_checked(rows, flat, bool)

    def row(self, index: int) -> Bytes:
        row = self._rows[index] or []
        out = np.empty(len(row), self._dtype)
        self.write(index, index + 1, as_bytes(out))
        return as_bytes(out)

    def _write_int32(self, rows: list[list[object]], flat: npt.NDArray[np.generic]) -> None:
        values = marshalled.list_ints(rows, len(flat))
        if values is None:
            raise LayoutMiss(self._name, INT64)
        flat[:] = values

    def _write_floats(self, rows: list[list[object]], flat: npt.NDArray[np.generic]) -> None:
        values = marshalled.list_floats(rows, len(flat))
        if values is None:
            raise LayoutMiss(self._name, OBJECTS)
        flat.reshape(values.shape)[:] = values

    def _write_checked(self, rows: list[list[object]], flat: npt.NDArray[np.generic], kind: type) -> None:
        if set(map(type, chain.from_iterable(rows))) - {kind}:
            raise LayoutMiss(self._name, OBJECTS)
        try:
            flat[:] = np.fromiter(chain.from_iterable(rows), self._dtype, len(flat))
        except (OverflowError, ValueError):
            raise LayoutMiss(self._name, OBJECTS) from None
