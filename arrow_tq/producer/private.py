"""Rows become arrays of their own, or stay the caller's: where no store's memory is at hand to write to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from arrow_tq.producer.arrays import PLAIN_NAMES, Mask, Source
from arrow_tq.producer.convert import Conversion
from arrow_tq.producer.filling import BLOCK_BYTES, Selection
from arrow_tq_schemas.fields import Field

Values = npt.NDArray[np.generic]


def convert(
    conversion: Conversion,
    source: Source,
    selections: list[Selection],
    start: int,
) -> tuple[list[Values], Mask | None, bool]:
    """Rows from ``start`` on by layer group, which of them are valid, and whether they are a copy."""
    field, storage = conversion.field, conversion.field.type.numpy
    given, rows = source.values, len(source)
    nulls: Mask = np.zeros(rows, dtype=np.bool_) if source.valid is None else ~source.valid
    in_place = (
        len(field.groups) == 1
        and source.dtype in (field.dtype, PLAIN_NAMES[storage])
        and not conversion.narrows_float
        and given.dtype.isnative
        and given.flags.c_contiguous
        and given.flags.aligned
        and not nulls.any()
    )
    if in_place and conversion.bounds is None:
        return [given.view(storage)], None, source.private
    shapes = [field.group_shape(group) for group in range(len(field.groups))]
    out = [] if in_place else [np.empty((rows, *shape), storage) for shape in shapes]
    step = max(1, BLOCK_BYTES // max(given.itemsize * field.row_bytes // storage.itemsize, 1))
    for row in range(0, rows, step):
        block, blanks = given[row : row + step], nulls[row : row + step]
        if blanks.any():
            block = block.copy()
            block[blanks] = 0
        block, found = conversion.apply(block, source.dtype, start + row)
        if found is not None:
            blanks |= found
        for target, selection in zip(out, selections, strict=False):
            np.copyto(target[row : row + step], block[selection], casting="unsafe")
    if in_place:
        out = [given.view(storage)]
    if not nulls.any():
        return out, None, source.private or not in_place
    if in_place:
        out = [values.copy() for values in out]
    for values in out:
        values[nulls] = 0
    return out, ~nulls, True


def selections(field: Field) -> list[Selection]:
    """Index of each layer group inside ``[rows, *field.shape]``."""
    if field.layer_axis is None:
        return [(slice(None),)]
    found, first = [], 0
    for layers in field.groups:
        before = (slice(None),) * (1 + field.layer_axis)
        found.append((*before, slice(first, first + len(layers))))
        first += len(layers)
    return found
