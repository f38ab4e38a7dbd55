"""Rows that are arrays or tensors of one dtype: one flat buffer, whatever their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles import tensors_io
from arrow_tq.bundles.dtypes import dtype_json
from arrow_tq.bundles.plans import (
    BlockPlan,
    Bytes,
    FieldPlan,
    Sizes,
    array_blocks,
    as_bytes,
    columns_of,
    row_blocks,
)
from arrow_tq_schemas.errors import InvalidInput

Rows = Sequence[object]
_dtype_of, _ndim_of, _shape_of = attrgetter("dtype"), attrgetter("ndim"), attrgetter("shape")


def plan_rows(plan: FieldPlan, rows: Rows, present: Sequence[object]) -> bool:
    """Plan a list of arrays, or of tensors, with None between them; False where they differ in kind.

    Raises:
        InvalidInput: a row whose values cannot be stored; names it.
    """
    numpy = type(present[0]) is np.ndarray
    dtypes, ndims = set(map(_dtype_of, present)), set(map(_ndim_of, present))
    if len(dtypes) != 1 or len(ndims) != 1:
        return False
    (ndim,) = ndims
    try:
        if numpy:
            (dtype,) = dtypes
            described, item = dtype_json(dtype), dtype.itemsize
        else:
            described = tensors_io.described(present[0]).dtype
            item = tensors_io.item_bytes(described)
    except InvalidInput as error:
        raise InvalidInput(f"{plan.name}: {error.message}", path=plan.name) from None
    plan.layout = "arrays"
    plan.meta = {"of": "numpy" if numpy else "torch", "dtype": described, "ndim": ndim}
    sizes = _plan_shapes(plan, present, rows, ndim) * item
    if numpy:
        native = dtype.isnative and dtype.kind in "biufc"
        source: _Source = _Arrays(rows, dtype if native else None, ndim)
    else:
        source = _Tensors(plan.name, rows)
    plan.buffers["values"] = row_blocks(sizes, source.write, source.row)
    return True


def plan_array(plan: FieldPlan, value: object) -> None:
    """Plan one array or tensor that is a field by itself.

    Raises:
        InvalidInput: its values cannot be stored.
    """
    plan.layout, plan.sequence = "array", False
    try:
        if isinstance(value, np.ndarray):
            shape = value.shape
            plan.meta = {"of": "numpy", "dtype": dtype_json(value.dtype), "shape": list(shape)}
            flat: Bytes | None = None
        else:
            kind = tensors_io.described(value)
            shape, flat = kind.shape, tensors_io.as_bytes(value)
            plan.meta = {"of": "torch", "dtype": kind.dtype, "shape": list(shape)}
    except InvalidInput as error:
        raise InvalidInput(f"{plan.name}: {error.message}", path=plan.name) from None
    plan.sequence, plan.count = bool(shape), shape[0] if shape else 1
    if flat is not None:
        width = flat.size // plan.count if plan.count else 0
        plan.buffers["values"] = array_blocks(flat.reshape(plan.count, width))
    elif isinstance(value, np.ndarray):
        plan.buffers["values"] = _array_blocks(value if value.ndim else value.reshape(1))


def _array_blocks(values: npt.NDArray[np.generic]) -> list[BlockPlan]:
    if values.flags.c_contiguous or not values.size:
        return array_blocks(values)
    # Strided, or in Fortran order: rows are gathered a block at a time, never the whole array.
    width = values.nbytes // len(values)
    return row_blocks(
        np.full(len(values), width, np.int64),
        lambda first, end, out: np.copyto(out, as_bytes(values[first:end])),
        lambda index: as_bytes(values[index : index + 1]),
    )


def _plan_shapes(plan: FieldPlan, present: Sequence[object], rows: Rows, ndim: int) -> Sizes:
    """Shapes (1-d: lengths) of all rows into ``plan``, those of None as 0; gives elements by row."""
    if ndim == 1:
        known: Sizes = np.fromiter(map(len, present), np.int64, len(present))  # type: ignore[arg-type]
    else:
        known = np.array(list(map(_shape_of, present)), np.int64).reshape(len(present), ndim)
    if len(present) < len(rows):
        valid = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        plan.buffers["valid"] = array_blocks(valid)
        whole = np.zeros((len(rows), *known.shape[1:]), np.int64)
        whole[valid] = known
        known = whole
    if ndim == 1:
        meta, buffers = columns_of(known)
        elements = known
    else:
        meta, buffers = {}, {}
        if (known == known[0]).all() and "valid" not in plan.buffers:
            meta["shape"] = [int(one) for one in known[0]]
        else:
            buffers["shapes"] = array_blocks(known) if ndim else []
        elements = known.prod(axis=1, dtype=np.int64)
    plan.meta.update(meta)
    plan.buffers.update(buffers)
    if "valid" in plan.buffers and ndim != 1:
        elements = elements * valid
    return elements


class _Source:
    """Where the bytes of rows come from."""

    def write(self, first: int, end: int, out: Bytes) -> None:
        raise NotImplementedError

    def row(self, index: int) -> Bytes:
        raise NotImplementedError


class _Arrays(_Source):
    def __init__(self, rows: Rows, native: np.dtype[np.generic] | None, ndim: int) -> None:
        self._rows = rows
        self._native = native
        self._flat = ndim == 1

    def write(self, first: int, end: int, out: Bytes) -> None:
        parts: list[npt.NDArray[np.generic]] = [row for row in self._rows[first:end] if row is not None]  # type: ignore[misc]
        if not self._flat:
            parts = [row.reshape(-1) for row in parts]
        if self._native is None:
            # Byte order, records, times: as they lie in memory.
            parts = [as_bytes(row) for row in parts]
            np.concatenate(parts, out=out)
        else:
            np.concatenate(parts, out=out.view(self._native))

    def row(self, index: int) -> Bytes:
        return as_bytes(self._rows[index])  # type: ignore[arg-type]


class _Tensors(_Source):
    def __init__(self, name: str, rows: Rows) -> None:
        self._name = name
        self._rows = rows

    def write(self, first: int, end: int, out: Bytes) -> None:
        parts = [self.row(index) for index in range(first, end) if self._rows[index] is not None]
        np.concatenate(parts, out=out)

    def row(self, index: int) -> Bytes:
        try:
            return tensors_io.as_bytes(self._rows[index])
        except InvalidInput as error:
            path = f"{self._name}[{index}]"
            raise InvalidInput(f"{path}: {error.message}", path=path) from None
