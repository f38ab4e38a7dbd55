"""``run.table``: segments with their payload as list columns, for DuckDB, pandas, polars, Parquet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from arrow_tq.backend import Backend
from arrow_tq.trainer.data import Column
from arrow_tq.trainer.fetch import fetch
from arrow_tq.trainer.segments import load
from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.commands import View
from arrow_tq_schemas.fields import Field


def segment_table(
    backend: Backend, run: str, fields: Sequence[Field], ids: Sequence[str], view: View
) -> pa.Table:
    """Metadata columns of the segments, then one list column a field."""
    table, manifests = load(backend, run, ids, view)
    data = fetch(backend, run, manifests, fields)
    for field in fields:
        column = list_column(data[field.name])
        metadata = {"arrow_tq.dtype": field.dtype, "arrow_tq.shape": ",".join(map(str, field.shape))}
        table = table.append_column(pa.field(field.name, column.type, metadata=metadata), column)
    return table


def list_column(column: Column) -> pa.Array:
    """``large_list`` of a column's values; items with a shape are flat fixed-size lists.

    Over the packed buffer, without a copy, unless a forwarded field's fill rows must be left out.
    bfloat16 becomes float32 (exact), bool Arrow's own.
    """
    values, offsets = column.packed, column.offsets
    if column.field.domain == "forwarded":
        values = np.concatenate(list(column)) if len(column) else values
        offsets = np.concatenate([[0], np.cumsum(column.rows)])
    if column.field.dtype == "bfloat16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    width = math.prod(values.shape[1:])
    flat = to_array(np.ascontiguousarray(values).reshape(-1), None, pa.from_numpy_dtype(values.dtype))
    if column.field.dtype == "bool":
        flat = flat.cast(pa.bool_())
    items = pa.FixedSizeListArray.from_arrays(flat, width) if values.ndim > 1 else flat
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), items)
