"""Rows that are one value each: numbers, numpy scalars, text, bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles import marshalled
from arrow_tq.bundles.dtypes import dtype_json
from arrow_tq.bundles.plans import Bytes, FieldPlan, array_blocks, columns_of, row_blocks
from arrow_tq_schemas.errors import InvalidInput

Rows = Sequence[object]
_NUMBERS = {int: ("int", "<i8"), float: ("float", "<f8"), bool: ("bool", "|b1")}
_NUMPY_KINDS = "biufcmM"
SAMPLES = 64
"""Rows that are looked at before all of a list is written down to see whether they are numbers."""


def plan_numbers(plan: FieldPlan, rows: list[object]) -> bool:
    """Plan a list of floats alone, or of ints of 32 bits alone: at once what most small fields are.

    Returns:
        False where it is none; nothing else was found out then.
    """
    kind = type(rows[0])
    if kind not in (int, float) or set(map(type, rows[:: -(-len(rows) // SAMPLES)])) != {kind}:
        return False
    values: npt.NDArray[np.generic] | None
    values = marshalled.ints(rows) if kind is int else marshalled.floats(rows)
    if values is None:
        return False
    element, dtype = _NUMBERS[kind]
    _plan_values(plan, rows, rows, values.astype(dtype), {"element": element, "dtype": dtype})
    return True


def plan_rows(plan: FieldPlan, rows: Rows, present: Sequence[object]) -> bool:
    """Plan a list of single values of one type, None between them; False where no column can hold them."""
    kind = type(present[0])
    if kind is str or kind is bytes:
        _plan_strings(plan, rows, kind is str)
    elif kind in _NUMBERS:
        element, dtype = _NUMBERS[kind]
        whole = rows if len(present) == len(rows) else [0 if row is None else row for row in rows]
        try:
            values = np.fromiter(whole, np.dtype(dtype), len(rows))
        except OverflowError:
            return False
        _plan_values(plan, rows, present, values, {"element": element, "dtype": dtype})
    elif issubclass(kind, np.generic):
        return _plan_numpy(plan, rows, present)
    else:
        return False
    return True


def _plan_numpy(plan: FieldPlan, rows: Rows, present: Sequence[object]) -> bool:
    dtypes = {row.dtype for row in present if isinstance(row, np.generic)}
    (dtype, *others) = dtypes
    if others or dtype.kind not in _NUMPY_KINDS:
        return False
    try:
        described = dtype_json(dtype)
    except InvalidInput:
        return False
    zero = bytes(dtype.itemsize)
    raw = b"".join([row.tobytes() if isinstance(row, np.generic) else zero for row in rows])
    values = np.frombuffer(raw, dtype)
    _plan_values(plan, rows, present, values, {"element": "numpy", "dtype": described})
    return True


def _plan_values(
    plan: FieldPlan, rows: Rows, present: Sequence[object], values: np.ndarray, meta: dict[str, object]
) -> None:
    plan.layout, plan.meta = "scalars", meta
    if len(present) < len(rows):
        plan.buffers["valid"] = array_blocks(
            np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        )
    plan.buffers["values"] = array_blocks(values)


def _plan_strings(plan: FieldPlan, rows: Rows, text: bool) -> None:
    """Text is encoded block by block: all of it at once would be a second copy of the field."""
    plan.layout, plan.meta = "strings", {"element": "str" if text else "bytes"}
    if any(row is None for row in rows):
        valid = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        plan.buffers["valid"] = array_blocks(valid)
    encoded = _encoded_text if text else _own_bytes
    sizes = np.fromiter(map(_text_bytes if text else _len, rows), np.int64, len(rows))
    meta, buffers = columns_of(sizes)
    plan.meta.update(meta)
    plan.buffers.update(buffers)

    def write(first: int, end: int, out: Bytes) -> None:
        np.copyto(out, np.frombuffer(b"".join(map(encoded, rows[first:end])), np.uint8))

    plan.buffers["values"] = row_blocks(sizes, write, lambda row: np.frombuffer(encoded(rows[row]), np.uint8))


def _encoded_text(row: object) -> bytes:
    # Surrogates one by one, as they are: three bytes each.
    return row.encode("utf-8", "surrogatepass") if isinstance(row, str) else b""


def _text_bytes(row: object) -> int:
    assert row is None or isinstance(row, str)
    return 0 if row is None else len(row) if row.isascii() else len(_encoded_text(row))


def _own_bytes(row: object) -> bytes:
    return row if isinstance(row, bytes) else b""


def _len(row: object) -> int:
    return len(_own_bytes(row))


def byte_blocks(parts: Sequence[bytes], sizes: np.ndarray) -> list:  # type: ignore[type-arg]
    """Blocks of rows of bytes."""

    def write(first: int, end: int, out: Bytes) -> None:
        np.copyto(out, np.frombuffer(b"".join(parts[first:end]), np.uint8))

    return row_blocks(sizes, write, lambda index: np.frombuffer(parts[index], np.uint8))
