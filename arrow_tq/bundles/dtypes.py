"""numpy dtypes as JSON, byte order and fields included; refused where that would not be exact."""

from __future__ import annotations

import functools

import numpy as np

from arrow_tq_schemas.errors import InvalidInput, MalformedMessage


@functools.lru_cache(256)
def dtype_json(dtype: np.dtype[np.generic]) -> object:
    """A dtype as JSON: its ``str``, or a list of its fields.

    Raises:
        InvalidInput: Python objects, no bytes, or a dtype of another library that numpy cannot name.
    """
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidInput(f"dtype {dtype}: it holds {'Python objects' if dtype.hasobject else 'no bytes'}")
    described = np.lib.format.dtype_to_descr(dtype)
    plain = described if isinstance(described, str) else [_listed(one) for one in described]
    if json_dtype(plain) != dtype:
        raise InvalidInput(f"dtype {dtype}: numpy itself cannot describe it")
    return plain


def json_dtype(value: object) -> np.dtype[np.generic]:
    """The dtype that ``dtype_json`` described; raises ``MalformedMessage``."""
    try:
        dtype = np.lib.format.descr_to_dtype(_described(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise MalformedMessage(f"dtype {value!r}: {error}") from None
    if dtype.hasobject or not dtype.itemsize:
        raise MalformedMessage(f"dtype {value!r}: no plain values")
    return dtype


def _listed(value: object) -> object:
    return [_listed(part) for part in value] if isinstance(value, tuple | list) else value


def _described(value: object) -> object:
    """Lists back to the tuples that numpy wants for fields, shapes and titles."""
    if not isinstance(value, list):
        return value
    fields = []
    for name, kind, *shape in value:
        label = tuple(name) if isinstance(name, list) else name
        inner = kind if isinstance(kind, str) else _described(kind)
        fields.append((label, inner, *(tuple(one) for one in shape)))
    return fields
