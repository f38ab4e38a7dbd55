"""The ``.npy`` header, read by a strict grammar: nothing in it is evaluated, no objects are loaded."""

from __future__ import annotations

import math
import re

import numpy as np

from arrow_tq.adapters.payload import Base64Text, EncodedRows, Item
from arrow_tq_schemas.errors import MalformedMessage

MAGIC = b"\x93NUMPY"
HEADER_BYTES_MAX = 4096
"""A header of three dimensions takes 118 bytes."""
_DTYPES = ("|u1", "|i1", "<u2", "<i2", "<i4", "<u4", "<i8")
_HEADER = re.compile(
    rb"\{ *'descr': *'(?P<descr>[|<>=][a-zA-Z]\d{1,3})' *, *'fortran_order': *(?P<fortran>True|False) *, *"
    rb"'shape': *\((?P<shape>[\d, ]{0,80})\) *,? *\} *\n?"
)


def rows_of(text: Base64Text, item: Item) -> EncodedRows:
    """Rows of a ``.npy`` file in base64: ``[rows, layers, topk]`` of integers in C order.

    Raises:
        MalformedMessage: no ``.npy``, another shape or dtype, or fewer or more bytes than it says.
    """
    header, offset = _header(text)
    found = _HEADER.fullmatch(header)
    if found is None:
        raise MalformedMessage(f"{text.place}: a .npy header that cannot be read: {header[:80]!r}")
    descr, shape = found["descr"].decode(), _shape(found["shape"], text)
    if descr not in _DTYPES or found["fortran"] == b"True":
        order = "Fortran" if found["fortran"] == b"True" else "C"
        raise MalformedMessage(
            f"{text.place}: a .npy of {descr!r} in {order} order, expected C order and one of "
            f"{', '.join(_DTYPES)}"
        )
    if len(shape) != 3 or shape[1:] != item:
        raise MalformedMessage(
            f"{text.place}: a .npy of shape {list(shape)}, expected [rows, {item[0]} layers, {item[1]} ids]",
            shape=list(shape),
            layers=item[0],
            topk=item[1],
        )
    dtype = np.dtype(descr)
    size, came = math.prod(shape) * dtype.itemsize, text.nbytes - offset
    if came != size:
        raise MalformedMessage(
            f"{text.place}: a .npy of shape {list(shape)} and {dtype.name} has {size} bytes, got {came}"
        )
    return EncodedRows(text, item, dtype, shape[0], offset)


def _header(text: Base64Text) -> tuple[bytes, int]:
    """The header's text, and where the data begins."""
    start = bytes(text.read(0, min(12, text.nbytes)))
    if len(start) < 12 or not start.startswith(MAGIC) or start[6] not in (1, 2, 3):
        raise MalformedMessage(f"{text.place}: no .npy: it begins with {start[:8]!r}")
    # Version 1 has two bytes of length, later ones four.
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(start[8 : 8 + width], "little")
    begin = 8 + width
    if length > HEADER_BYTES_MAX or begin + length > text.nbytes:
        raise MalformedMessage(
            f"{text.place}: a .npy header of {length} bytes, expected at most {HEADER_BYTES_MAX} of the "
            f"{text.nbytes} that came"
        )
    return bytes(text.read(begin, begin + length)), begin + length


def _shape(raw: bytes, text: Base64Text) -> tuple[int, ...]:
    parts = [part.strip() for part in raw.decode().split(",")]
    if parts and not parts[-1]:
        parts.pop()
    if not all(part.isdigit() and len(part) <= 15 for part in parts):
        raise MalformedMessage(f"{text.place}: a .npy shape that cannot be read: {raw!r}")
    return tuple(map(int, parts))
