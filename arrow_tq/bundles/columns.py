"""A bundle as an Arrow table, a row a sample: what SQL sees.

Ragged numbers are ``large_list`` columns over the buffers as they were read, scalars primitives, text and
objects (as their JSON) ``large_string``. Fields that are not one row a sample are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.bundles.column_rows import RowReader
from arrow_tq.bundles.dtypes import json_dtype
from arrow_tq.bundles.objects import Decoder, field_name
from arrow_tq.bundles.pieces import Piece
from arrow_tq.bundles.plans import Bytes
from arrow_tq.bundles.selection import Selection
from arrow_tq.bundles.structure import FieldLayout, Structure

Pieces = Mapping[str, Sequence[Piece]]
_NUMBERS = "biuf"


def column_names(structure: Structure) -> list[str]:
    """Names of the columns that the table of a bundle has."""
    return [name for name, _ in _columns(structure)]


def positions_of(structure: Structure, names: Sequence[str]) -> list[int]:
    """Positions of the fields behind these columns."""
    return [position for name, position in _columns(structure) if name in names]


def to_table(structure: Structure, positions: Sequence[int], pieces: Mapping[int, Pieces]) -> pa.Table:
    """The fields at ``positions`` as a table of ``structure.rows`` rows."""
    names = {position: name for name, position in _columns(structure)}
    columns = {names[one]: _column(structure.fields[one], pieces[one]) for one in positions}
    if not columns:
        # A table keeps its number of rows in its columns alone.
        columns = {"sample": pa.chunked_array([pa.array(np.arange(structure.rows))])}
    return pa.table(columns)


def _columns(structure: Structure) -> list[tuple[str, int]]:
    decoder = Decoder(())
    return [
        (field_name(decoder.restore(field.key)), position)
        for position, field in enumerate(structure.fields)
        if field.per_row and _fits(field)
    ]


def _fits(field: FieldLayout) -> bool:
    if field.layout in ("strings", "objects"):
        return field.meta.get("element") != "bytes"
    if field.layout == "msgpack" or (field.meta.get("of") == "torch" and _torch_dtype(field) is None):
        return False
    if field.layout == "array" and len(field.meta["shape"]) != 1:  # type: ignore[arg-type]
        return False
    return _dtype(field).kind in _NUMBERS and _dtype(field).itemsize <= 8


def _dtype(field: FieldLayout) -> np.dtype[np.generic]:
    return _torch_dtype(field) or json_dtype(field.meta["dtype"])


def _torch_dtype(field: FieldLayout) -> np.dtype[np.generic] | None:
    if field.meta.get("of") != "torch":
        return None
    try:
        return np.dtype(str(field.meta["dtype"]))
    except TypeError:
        return np.dtype("u2") if field.meta["dtype"] == "bfloat16" else None


def _column(field: FieldLayout, pieces: Pieces) -> pa.ChunkedArray:
    reader = RowReader(field, pieces, Selection(None, None), "", None)
    valid = reader.valid()
    text = field.layout in ("strings", "objects")
    dtype = np.dtype("u1") if text else _dtype(field)
    chunks = []
    for piece in pieces["values"]:
        known = None if valid is None else valid[piece.first : piece.first + piece.rows]
        if field.layout in ("scalars", "array"):
            chunks.append(_numbers(piece.memory.view(dtype), field, known))
            continue
        ends = np.array(reader.ends(piece, dtype.itemsize), np.int64)
        if text:
            chunks.append(_texts(ends, piece.memory, known))
        else:
            values = _numbers(piece.memory.view(dtype), field, None)
            chunks.append(_lists(ends, values, known))
    if not chunks:
        kind = pa.large_string() if text else pa.large_list(_numbers(np.empty(0, dtype), field, None).type)
        return pa.chunked_array([pa.nulls(0, kind)])
    return pa.chunked_array(chunks)


def _numbers(
    values: npt.NDArray[np.generic], field: FieldLayout, valid: npt.NDArray[np.bool_] | None
) -> pa.Array:
    if field.meta.get("of") == "torch" and field.meta["dtype"] == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif values.dtype == np.float16:
        # DuckDB has no half floats.
        values = values.astype(np.float32)
    elif not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    return pa.array(values, mask=None if valid is None else ~valid)


def _lists(ends: npt.NDArray[np.int64], values: pa.Array, valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    return pa.Array.from_buffers(
        pa.large_list(values.type), len(ends) - 1, [_bits(valid), pa.py_buffer(ends)], children=[values]
    )


def _texts(ends: npt.NDArray[np.int64], memory: Bytes, valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    array = pa.Array.from_buffers(
        pa.large_binary(), len(ends) - 1, [_bits(valid), pa.py_buffer(ends), pa.py_buffer(memory)]
    )
    try:
        return array.cast(pa.large_string())
    except pa.ArrowInvalid:
        texts = [None if one is None else one.decode("utf-8", "replace") for one in array.to_pylist()]
        return pa.array(texts, pa.large_string())


def _bits(valid: npt.NDArray[np.bool_] | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
