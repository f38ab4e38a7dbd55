"""Rows that are arrays or tensors of one dtype: one flat buffer, whatever their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles import tensors_io
from arrow_tq.bundles.array_rows import AHEAD, ArrayRows
from arrow_tq.bundles.dtypes import dtype_json
from arrow_tq.bundles.plans import BlockPlan, Bytes, FieldPlan, LayoutMiss, array_blocks, as_bytes, row_blocks
from arrow_tq_schemas.errors import InvalidInput


def plan_rows(plan: FieldPlan, rows: Sequence[object], some: object, hint: str | None) -> bool:
    """Plan a list of arrays, or of tensors, with None between them; False where they differ in kind.

    ``some`` is one of them. Rows are looked at when it is their turn to be gathered: ``LayoutMiss`` then.

    Raises:
        InvalidInput: a row whose values cannot be stored; names it.
    """
    try:
        if isinstance(some, np.ndarray):
            described, item, ndim = dtype_json(some.dtype), some.dtype.itemsize, some.ndim
        else:
            kind = tensors_io.described(some)
            described, item, ndim = kind.dtype, tensors_io.item_bytes(kind.dtype), len(kind.shape)
    except InvalidInput as error:
        raise InvalidInput(f"{plan.name}: {error.message}", path=plan.name) from None
    looked = ArrayRows(plan.name, rows, some, item)
    try:
        looked.look_ahead(hint == AHEAD)
    except LayoutMiss:
        return False
    plan.layout = "arrays"
    plan.meta = {
        "of": "numpy" if isinstance(some, np.ndarray) else "torch",
        "dtype": described,
        "ndim": ndim,
    }
    if looked.all_looked_at:
        plan.buffers.update(looked.sides(plan.meta))
    else:
        plan.late = partial(looked.sides, plan.meta)
    plan.buffers["values"] = looked.blocks()
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
