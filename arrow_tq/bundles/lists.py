"""Rows that are Python lists of numbers: one flat buffer, the type of every element checked.

``marshal`` writes a list as a type code and the value of each element, in C, exact about types (True is
not 1, a numpy scalar is no int). Only its *output* is used here, as a table of codes and numbers: 12 ns an
element, where checking types and converting apart takes three times that. Nothing is ever loaded with it.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

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
_MARSHAL_VERSION = 2
"""Binary floats, and no references between equal objects."""
_INT_RECORD = np.dtype([("code", "u1"), ("value", "<i4")])
_FLOAT_RECORD = np.dtype([("code", "u1"), ("value", "<f8")])
_HEAD = _INT_RECORD
"""Of a marshalled list: its code and its length."""
_LIST, _INT, _FLOAT = b"[ig"

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
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    plan.layout = "lists"
    plan.meta = {"element": element.removesuffix("32").removesuffix("64"), "dtype": DTYPES[element]}
    if len(present) < len(rows):
        plan.buffers["valid"] = array_blocks(
            np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        )
    meta, buffers = columns_of(lengths)
    plan.meta.update(meta)
    plan.buffers.update(buffers)
    dtype = np.dtype(DTYPES[element])
    source = _Lists(plan.name, rows, element, dtype, lengths)
    plan.buffers["values"] = row_blocks(lengths * dtype.itemsize, source.write, source.row)
    return True


class _Lists:
    def __init__(
        self,
        name: str,
        rows: Rows,
        element: str,
        dtype: np.dtype[np.generic],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        self._name = name
        self._rows = rows
        self._element = element
        self._dtype = dtype
        self._lengths = lengths

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
        try:
            raw = marshal.dumps(rows, _MARSHAL_VERSION)
        except ValueError:
            raise LayoutMiss(self._name, OBJECTS) from None
        # A list's head is as long as an int: the whole is one table.
        if len(raw) != (len(flat) + len(rows) + 1) * _INT_RECORD.itemsize:
            raise LayoutMiss(self._name, INT64)
        table = np.frombuffer(raw, _INT_RECORD)
        ints = table["code"] == _INT
        heads = table["code"] == _LIST
        if np.count_nonzero(ints) != len(flat) or np.count_nonzero(heads) != len(rows) + 1:
            raise LayoutMiss(self._name, INT64)
        if table["value"][heads].tolist() != [len(rows), *map(len, rows)]:
            raise LayoutMiss(self._name, OBJECTS)
        flat[:] = table["value"][ints]

    def _write_floats(self, rows: list[list[object]], flat: npt.NDArray[np.generic]) -> None:
        try:
            raw = marshal.dumps(rows, _MARSHAL_VERSION)
        except ValueError:
            raise LayoutMiss(self._name, OBJECTS) from None
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        if len(raw) != (1 + len(rows)) * _HEAD.itemsize + len(flat) * _FLOAT_RECORD.itemsize:
            raise LayoutMiss(self._name, OBJECTS)
        table = _floats_of(raw, lengths)
        if table is None or (table["code"] != _FLOAT).any():
            raise LayoutMiss(self._name, OBJECTS)
        flat.reshape(table.shape)[:] = table["value"]

    def _write_checked(self, rows: list[list[object]], flat: npt.NDArray[np.generic], kind: type) -> None:
        if set(map(type, chain.from_iterable(rows))) - {kind}:
            raise LayoutMiss(self._name, OBJECTS)
        try:
            flat[:] = np.fromiter(chain.from_iterable(rows), self._dtype, len(flat))
        except (OverflowError, ValueError):
            raise LayoutMiss(self._name, OBJECTS) from None


def _floats_of(raw: bytes, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.void] | None:
    """Records of the elements of marshalled lists, if elements are floats; None where lists are not there.

    ``[rows, length]`` where all are equally long, a view then, otherwise flat.
    """
    head, item = _HEAD.itemsize, _FLOAT_RECORD.itemsize
    sizes = head + lengths * item
    ends = head + np.cumsum(sizes)
    starts = ends - sizes
    data = np.frombuffer(raw, np.uint8)
    heads = data[starts[:, np.newaxis] + np.arange(head)].view(_HEAD)[:, 0]
    if (heads["code"] != _LIST).any() or (heads["value"] != lengths).any():
        return None
    if len(lengths) and (lengths == lengths[0]).all():
        shape, strides = (len(lengths), int(lengths[0])), (int(sizes[0]), item)
        return np.ndarray(shape, _FLOAT_RECORD, raw, 2 * head, strides)
    places = zip((starts + head).tolist(), ends.tolist(), strict=True)
    return np.frombuffer(b"".join([raw[first:end] for first, end in places]), _FLOAT_RECORD)
