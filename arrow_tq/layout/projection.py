"""Layers of rows."""

from __future__ import annotations

import numpy as np

from arrow_tq.layout.columns import Values
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.fields import Field


def project(values: Values, field: Field, layers: tuple[int, ...]) -> Values:
    """The chosen layers of ``[rows, *item]``: a view where they are consecutive."""
    assert field.layer_axis is not None
    axis = 1 + field.layer_axis
    if max(layers, default=0) >= values.shape[axis] or min(layers, default=0) < 0:
        raise MalformedMessage(f"layers {list(layers)}: the group of {field.name!r} has {values.shape[axis]}")
    if layers == tuple(range(layers[0], layers[0] + len(layers))):
        return values[(slice(None),) * axis + (slice(layers[0], layers[0] + len(layers)),)]
    return np.take(values, layers, axis=axis)
