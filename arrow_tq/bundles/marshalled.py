"""Python numbers as arrays, the type of each one checked: by the table that ``marshal`` writes of a list.

``marshal`` writes a list as a type code and the value of each element, in C, exact about types (True is
not 1, a numpy scalar is no int). Only its *output* is used here, as a table of codes and numbers: 12 ns an
element, where checking types and converting apart takes three times that. Nothing is ever loaded with it.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_VERSION = 2
"""Binary floats, and no references between equal objects."""
_INT_RECORD = np.dtype([("code", "u1"), ("value", "<i4")])
_FLOAT_RECORD = np.dtype([("code", "u1"), ("value", "<f8")])
_HEAD = _INT_RECORD
"""Of a marshalled list: its code and its length."""
_LIST, _INT, _FLOAT = b"[ig"

Lists = Sequence[list[object]]


def ints(numbers: list[object]) -> npt.NDArray[np.int32] | None:
    """A list of ints as an array; None where one of them is anything else, or has more than 32 bits."""
    return _flat(numbers, _INT_RECORD, _INT)


def floats(numbers: list[object]) -> npt.NDArray[np.float64] | None:
    """A list of floats as an array; None where one of them is anything else."""
    return _flat(numbers, _FLOAT_RECORD, _FLOAT)


def list_ints(rows: Lists, count: int) -> npt.NDArray[np.int32] | None:
    """All elements of lists of ints, ``count`` in all; None where one of them is anything else."""
    raw = _dumped(rows)
    # A list's head is as long as an int: the whole is one table.
    if raw is None or len(raw) != (count + len(rows) + 1) * _INT_RECORD.itemsize:
        return None
    table = np.frombuffer(raw, _INT_RECORD)
    elements = table["code"] == _INT
    heads = table["code"] == _LIST
    if np.count_nonzero(elements) != count or np.count_nonzero(heads) != len(rows) + 1:
        return None
    if table["value"][heads].tolist() != [len(rows), *map(len, rows)]:
        return None
    values: npt.NDArray[np.int32] = table["value"][elements]
    return values


def list_floats(rows: Lists, count: int) -> npt.NDArray[np.float64] | None:
    """All elements of lists of floats, ``count`` in all; None where one of them is anything else.

    ``[rows, length]`` where all are equally long, a view then, otherwise flat.
    """
    raw = _dumped(rows)
    head, item = _HEAD.itemsize, _FLOAT_RECORD.itemsize
    if raw is None or len(raw) != (1 + len(rows)) * head + count * item:
        return None
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    sizes = head + lengths * item
    ends = head + np.cumsum(sizes)
    starts = ends - sizes
    data = np.frombuffer(raw, np.uint8)
    heads = data[starts[:, np.newaxis] + np.arange(head)].view(_HEAD)[:, 0]
    if (heads["code"] != _LIST).any() or (heads["value"] != lengths).any():
        return None
    if len(lengths) and (lengths == lengths[0]).all():
        shape, strides = (len(lengths), int(lengths[0])), (int(sizes[0]), item)
        table = np.ndarray(shape, _FLOAT_RECORD, raw, 2 * head, strides)
    else:
        places = zip((starts + head).tolist(), ends.tolist(), strict=True)
        table = np.frombuffer(b"".join([raw[first:end] for first, end in places]), _FLOAT_RECORD)
    return None if (table["code"] != _FLOAT).any() else table["value"]


def _flat(numbers: list[object], record: np.dtype[np.void], code: int) -> npt.NDArray[Any] | None:
    raw = _dumped(numbers)
    if raw is None or len(raw) != _HEAD.itemsize + len(numbers) * record.itemsize:
        return None
    table = np.frombuffer(raw, record, offset=_HEAD.itemsize)
    return None if (table["code"] != code).any() else table["value"]


def _dumped(value: Sequence[object]) -> bytes | None:
    try:
        return marshal.dumps(value, _VERSION)  # type: ignore[arg-type]
    except ValueError:
        return None
