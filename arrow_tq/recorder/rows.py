"""What an engine hands over as rows: checked once, in its thread, where the mistake can be named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.producer.arrays import Source, as_source
from arrow_tq.producer.convert import Conversion
from arrow_tq_schemas.errors import InvalidInput, RowCountMismatch, ValueOutOfRange
from arrow_tq_schemas.fields import Field

POSITION_MAX = 1 << 48
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Narrowed:
    """Checked rows: casting ``values`` (``[rows, *field.shape]``) to the storage dtype loses nothing."""

    values: npt.NDArray[np.generic]
    nulls: npt.NDArray[np.bool_] | None
    """``[rows]``; None: no row is null. Values of null rows are zero."""


def narrow(
    field: Field, rows: object, starts: Positions, lengths: Positions | None
) -> tuple[Narrowed, Positions]:
    """Check rows of several requests, packed one after another; gives them and their lengths.

    Args:
        field: the declared field.
        rows: ``[sum(lengths), *field.shape]``, any array-like that ``put`` takes.
        starts: ``[requests]`` int64, position of each request's first row.
        lengths: ``[requests]`` int64; None: all rows are of the one request.

    Raises:
        InvalidField: shape or dtype does not fit; names both.
        ValueOutOfRange: a value does not fit; names field, value and its position in its own request.
        RowCountMismatch: the lengths do not add up to the rows; names both.
        InvalidInput: a start or a length is negative, or a position too large.
    """
    first = int(starts[0]) if len(starts) else 0
    source = as_source(field, rows, first)
    if lengths is None:
        lengths = np.array([len(source.values)], np.int64)
    if (starts < 0).any() or (lengths < 0).any() or (starts + lengths > POSITION_MAX).any():
        raise InvalidInput(
            f"field {field.name!r}: starts {starts.tolist()[:8]}, lengths {lengths.tolist()[:8]}: expected "
            "positions from 0 up"
        )
    total = int(lengths.sum())
    if total != len(source.values):
        raise RowCountMismatch(
            f"field {field.name!r}: {len(source.values)} rows for lengths that add up to {total}",
            rows=len(source.values),
            lengths=total,
        )
    conversion = Conversion.plan(field, source.dtype)
    try:
        return _narrow(conversion, source, 0, total, first), lengths
    except ValueOutOfRange as error:
        # Its position counts on from the first request's start: find whose row it is, and say that.
        row = int(str(error.details["position"])) - first
        edges = np.cumsum(lengths)
        index = int(np.searchsorted(edges, row, side="right"))
        begin = int(edges[index] - lengths[index])
        _narrow(conversion, source, begin, int(edges[index]), int(starts[index]))
        raise


def _narrow(conversion: Conversion, source: Source, begin: int, end: int, start: int) -> Narrowed:
    values = source.values[begin:end]
    nulls = None if source.valid is None else ~source.valid[begin:end]
    if nulls is not None and nulls.any():
        values = values.copy()
        values[nulls] = 0
    values, found = conversion.apply(values, source.dtype, start)
    if found is not None:
        values = values.copy()
        values[found] = 0
        nulls = found if nulls is None else nulls | found
    return Narrowed(values, nulls)
