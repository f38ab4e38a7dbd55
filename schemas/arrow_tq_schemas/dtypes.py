"""Logical dtypes and how each is stored.

A logical dtype is numpy's name for it, or ``bfloat16``. Two are stored as another type of the same
bits, with the logical name in the Arrow field's metadata: ``bfloat16`` as ``uint16`` (Arrow has no
such type) and ``bool`` as ``uint8`` (Arrow's bool is bit-packed, which no tensor library maps).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arrow_tq_schemas.errors import InvalidField

_STORED_AS = {"bfloat16": "uint16", "bool": "uint8"}
_PLAIN = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
NAMES: tuple[str, ...] = (*_PLAIN, "bfloat16", "bool")


@dataclass(frozen=True, slots=True)
class DType:
    """One logical dtype."""

    name: str
    """Logical name, as users write it."""
    numpy: np.dtype[np.generic]
    """Little-endian storage dtype; what ``fetch`` returns for ``bfloat16`` is its bits."""
    arrow: pa.DataType
    """Arrow storage type of one value."""
    integer_range: tuple[int, int] | None
    """Smallest and largest value, or None for floats and bool."""

    @property
    def is_float(self) -> bool:
        return self.name == "bfloat16" or self.numpy.kind == "f"


def dtype(name: str) -> DType:
    """The logical dtype called ``name``.

    Raises:
        InvalidField: the name is not one of ``NAMES``.
    """
    if name not in NAMES:
        raise InvalidField(f"unknown dtype {name!r}: expected one of {', '.join(NAMES)}", dtype=name)
    return _dtype(name)


@functools.cache
def _dtype(name: str) -> DType:
    storage = np.dtype(_STORED_AS.get(name, name)).newbyteorder("<")
    bounds = None
    if name not in _STORED_AS and storage.kind in "iu":
        info = np.iinfo(storage)
        bounds = int(info.min), int(info.max)
    return DType(name, storage, pa.from_numpy_dtype(storage), bounds)


def smallest_id_dtype(num_ids: int) -> str:
    """The narrowest dtype for ids ``0 .. num_ids - 1``: uint8, uint16 or int32."""
    if num_ids <= 1 << 8:
        return "uint8"
    return "uint16" if num_ids <= 1 << 16 else "int32"
