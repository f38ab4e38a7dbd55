"""What callers hand to ``put`` as rows: numpy, nested lists, pyarrow or torch, brought to numpy.

Nothing here looks at values more than it must to tell what they are; ``convert`` checks them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.producer.convert import out_of_range
from arrow_tq_schemas import dtypes
from arrow_tq_schemas.chunks import from_array
from arrow_tq_schemas.errors import InvalidField
from arrow_tq_schemas.fields import Field

Mask = npt.NDArray[np.bool_]
_NUMERIC = "biuf"
PLAIN_NAMES = {np.dtype(name): name for name in dtypes.NAMES if name != "bfloat16"}
"""numpy's names of storage dtypes: to ask a dtype for its name costs 10 us."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The caller's rows, as numpy of any layout."""

    values: npt.NDArray[np.generic]
    """``[rows, *field.shape]``; bfloat16 as uint16 bits."""
    valid: Mask | None
    """``[rows]``; None: every row. Values of other rows mean nothing."""
    dtype: str
    """Logical name of what the values are: numpy's, native order, or ``bfloat16``."""
    private: bool
    """The values are a copy that the caller does not have."""

    def __len__(self) -> int:
        return len(self.values)

    def has_nulls(self, first: int, end: int) -> bool:
        """Whether any row in ``[first, end)`` is known to be null."""
        return self.valid is not None and not self.valid[first:end].all()

    def part(self, first: int, end: int) -> Source:
        """Rows ``[first, end)``: views."""
        valid = None if self.valid is None else self.valid[first:end]
        return Source(self.values[first:end], valid, self.dtype, self.private)

    def blocks(self, first: int, end: int) -> Sequence[npt.NDArray[np.generic]]:
        """The values of those rows, in as many arrays as they are in."""
        return (self.values[first:end],)


def as_source(field: Field, array: object, start: int) -> Source:
    """Rows of ``field`` from whatever array-like this is; ``start`` is for messages.

    Raises:
        InvalidField: no numbers, ``None`` inside, ragged, masked, or not ``[rows, *field.shape]``.
    """
    if type(array) is np.ndarray and array.shape[1:] == field.shape and array.ndim:
        # The way of most arrays, at a twentieth of the cost of finding out what else it might be.
        name = PLAIN_NAMES.get(array.dtype)
        if name is not None:
            return Source(array, None, name, False)
    if isinstance(array, pa.Array | pa.ChunkedArray):
        source = _from_arrow(field, array, start)
    elif hasattr(array, "detach") and hasattr(array, "cpu"):
        source = _from_torch(field, array)
    else:
        source = _from_numpy(field, array, start)
    return _shaped(field, source, empty=isinstance(array, list | tuple) and not array)


def _shaped(field: Field, source: Source, empty: bool) -> Source:
    values = source.values
    if field.shape == () and values.ndim == 0:
        values = values.reshape(1)
    elif empty:
        values = values.reshape(0, *field.shape)
    if values.ndim == 0 or values.shape[1:] != field.shape:
        wanted = ", ".join(["rows", *map(str, field.shape)])
        raise InvalidField(
            f"field {field.name!r}: expected an array of shape [{wanted}], got {list(values.shape)}",
            field=field.name,
        )
    return Source(values, source.valid, source.dtype, source.private)


def _from_numpy(field: Field, array: object, start: int) -> Source:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidField(f"field {field.name!r}: a masked array; pass a pyarrow array with nulls instead")
    try:
        values: npt.NDArray[Any] = np.asarray(array)
    except (ValueError, TypeError, OverflowError) as error:
        raise _ragged(field, array, start, error) from None
    if field.type.integer_range is not None and values.dtype in (np.float64, object):
        values = _large_integers(field, array, start, values)
    if values.dtype == object:
        raise _not_numbers(field, values, start)
    private = isinstance(array, list | tuple | int | float | bool)
    if private and not values.size and values.dtype == np.float64:
        # numpy calls an empty list float64; it has no values that could say otherwise.
        values = values.astype(field.type.numpy)
    if values.dtype.name == "bfloat16":
        return Source(values.view(np.uint16), None, "bfloat16", private)
    if values.dtype.kind not in _NUMERIC:
        raise _wrong_dtype(field, str(values.dtype))
    return Source(values, None, values.dtype.name, private)


def _large_integers(field: Field, array: object, start: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Python integers that numpy made floats or objects of because int64 does not hold them all."""
    exact = np.asarray(array, dtype=object) if isinstance(array, list | tuple | int) else values
    if not exact.size or not all(isinstance(value, int) for value in exact.flat):
        return values
    low, high = field.type.integer_range or (0, 1)
    for index, value in np.ndenumerate(exact):
        if not low <= value <= high:
            row, *inside = index or (0,)
            raise out_of_range(field, value, start + row, inside, f"{low} to {high}")
    return exact.astype(field.type.numpy)


def _from_torch(field: Field, tensor: Any) -> Source:
    """A torch tensor, by its methods alone: this module must not import torch."""
    try:
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            # numpy has no such type. Whoever has a tensor has imported torch.
            bits = tensor.view(sys.modules["torch"].int16).numpy().view(np.uint16)
            return Source(bits, None, "bfloat16", False)
        values = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidField(f"field {field.name!r}: a tensor that numpy cannot show: {error}") from None
    if values.dtype.kind not in _NUMERIC:
        raise _wrong_dtype(field, str(values.dtype))
    return Source(values, None, values.dtype.name, False)


def _from_arrow(field: Field, array: pa.Array | pa.ChunkedArray, start: int) -> Source:
    if isinstance(array, pa.ChunkedArray):
        parts = [_from_arrow(field, chunk, start) for chunk in array.chunks if len(chunk)]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return Source(np.empty((0, *field.shape), field.type.numpy), None, field.dtype, True)
        masks = [_mask(part.valid, len(part.values)) for part in parts]
        values = np.concatenate([part.values for part in parts])
        return Source(values, np.concatenate(masks), parts[0].dtype, True)
    leaf, shape, valid = _leaf(field, array)
    if pa.types.is_boolean(leaf.type):
        leaf = leaf.cast(pa.uint8())
        kind = "bool"
    elif pa.types.is_integer(leaf.type) or pa.types.is_floating(leaf.type):
        kind = np.dtype(leaf.type.to_pandas_dtype()).name
    else:
        raise _wrong_dtype(field, str(array.type))
    values, leaf_valid = from_array(leaf, ())
    if leaf_valid is not None and shape:
        torn = ~leaf_valid.reshape(len(array), -1).all(axis=1) & _mask(valid, len(array))
        if torn.any():
            position = start + int(np.flatnonzero(torn)[0])
            raise InvalidField(f"field {field.name!r}: a null inside the row at position {position}")
    return Source(values.reshape(len(array), *shape), valid, kind, False)


def _leaf(field: Field, array: pa.Array) -> tuple[pa.Array, tuple[int, ...], Mask | None]:
    """The flat values under fixed-size lists, the item's shape, and which rows are there."""
    shape: tuple[int, ...] = ()
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if isinstance(array, pa.ExtensionArray):
        if not isinstance(array.type, pa.FixedShapeTensorType):
            raise _wrong_dtype(field, str(array.type))
        order = array.type.permutation
        if order is not None and list(order) != sorted(order):
            raise InvalidField(f"field {field.name!r}: a tensor with permutation {order}; pass it in C order")
        shape, array = tuple(array.type.shape), array.storage
        width = array.type.list_size
        return array.values.slice(array.offset * width, len(array) * width), shape, valid
    while pa.types.is_fixed_size_list(array.type):
        if shape and array.null_count:
            raise InvalidField(f"field {field.name!r}: null lists inside rows of {array.type}")
        width = array.type.list_size
        shape = (*shape, width)
        # .values ignores the slice, .flatten drops null lists: neither alone gives the rows in place.
        array = array.values.slice(array.offset * width, len(array) * width)
    return array, shape, valid


def _mask(valid: Mask | None, rows: int) -> Mask:
    return np.ones(rows, dtype=np.bool_) if valid is None else valid


def _wrong_dtype(field: Field, dtype: str) -> InvalidField:
    return InvalidField(f"field {field.name!r}: expected {field.dtype}, got {dtype}", field=field.name)


def _not_numbers(field: Field, values: npt.NDArray[Any], start: int) -> InvalidField:
    """Names the first element that is no number, in an array of objects."""
    for index, value in np.ndenumerate(values):
        if not isinstance(value, int | float | np.number | np.bool_):
            return InvalidField(
                f"field {field.name!r}, position {start + (index[0] if index else 0)}, index "
                f"{list(index[1:])}: expected {field.dtype}, got {value!r} (for missing rows pass a pyarrow "
                "array with nulls)",
                field=field.name,
            )
    return InvalidField(f"field {field.name!r}: expected {field.dtype}, got an array of objects")


def _ragged(field: Field, array: object, start: int, error: Exception) -> InvalidField:
    """Names the first row of a nested list whose shape is not the field's."""
    for row, item in enumerate(array if isinstance(array, list | tuple) else ()):
        try:
            shape: object = list(np.shape(item))
        except ValueError:
            shape = "ragged"
        if shape != list(field.shape):
            return InvalidField(
                f"field {field.name!r}, position {start + row}: expected an item of shape "
                f"{list(field.shape)}, got {shape}",
                field=field.name,
            )
    return InvalidField(f"field {field.name!r}: expected {field.dtype} rows: {error}", field=field.name)
