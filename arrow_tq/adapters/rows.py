"""Rows of ids, from any payload to a field's layers and dtype: counted, checked and narrowed in one go."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.output import Rows
from arrow_tq.adapters.payload import Block, Item, Payload
from arrow_tq.adapters.policy import Policy, Window, place
from arrow_tq.adapters.watch import RoutingWatch
from arrow_tq.producer.convert import Conversion, out_of_range
from arrow_tq_schemas.errors import InvalidField
from arrow_tq_schemas.fields import Field

BLOCK_BYTES = 256 << 10
"""What is decoded, checked and narrowed at a time: small enough to stay in the processor's cache."""


class Layers:
    """Which of the layers that an engine sends a field keeps."""

    def __init__(self, field: Field, sent: Sequence[int] | None) -> None:
        """``sent``: global ids of the engine's layers in its order; None: exactly the field's.

        Raises:
            InvalidField: the field is no ``[layers, topk]`` of integers, or keeps a layer that is not sent.
        """
        if field.layer_axis != 0 or len(field.shape) != 2 or field.type.integer_range is None:
            raise InvalidField(
                f"field {field.name!r}: engines send integers of [layers, topk] with layer_axis 0, got "
                f"{field.dtype} of shape {list(field.shape)} with layer_axis {field.layer_axis}",
                field=field.name,
            )
        kept = field.layer_ids or ()
        given = list(kept if sent is None else sent)
        place_of = {layer: index for index, layer in enumerate(given)}
        missing = [layer for layer in kept if layer not in place_of]
        if missing or len(place_of) != len(given):
            raise InvalidField(
                f"field {field.name!r}: layers {missing} are not among the {len(given)} different ones that "
                "the engine was said to send",
                field=field.name,
            )
        indices = [place_of[layer] for layer in kept]
        first = indices[0]
        in_a_row = indices == list(range(first, first + len(indices)))
        self.item: Item = (len(given), field.shape[1])
        self.selection: slice | list[int] = slice(first, first + len(indices)) if in_a_row else indices


def routed_rows(
    payload: Payload, field: Field, layers: Layers, window: Window, policy: Policy, where: str
) -> Rows:
    """Expert ids at the window's positions; whole rows of -1 become null.

    Raises:
        RowCountMismatch: the rows that came do not cover what the policy's rule says.
        ValueOutOfRange: an id past the field's experts, or -1 inside a row.
        MalformedMessage: rows that no router can have chosen.
    """
    watch = RoutingWatch(field, where, policy.identical_rows_max)
    rows = _rows(payload, field, layers, window, policy, watch)
    watch.finish()
    return rows


def indexer_rows(payload: Payload, field: Field, layers: Layers, window: Window, policy: Policy) -> Rows:
    """Positions that an indexer chose: each at most that of its row; -1 where the field pads with it.

    Raises:
        RowCountMismatch: the rows that came do not cover what the policy's rule says.
        ValueOutOfRange: a position after the row's own, or below 0 and no pad.
    """
    return _rows(payload, field, layers, window, policy, None)


def _rows(
    payload: Payload, field: Field, layers: Layers, window: Window, policy: Policy, watch: RoutingWatch | None
) -> Rows:
    # The count is settled first: nothing is decoded that would not be kept, so this bounds the memory too.
    placement = place(field.name, payload.rows, window, policy.rule)
    source = payload.dtype.name
    conversion = Conversion.plan(field, source)
    values: Block = np.empty((placement.keep, *field.shape), field.type.numpy)
    valid: npt.NDArray[np.bool_] = np.ones(placement.keep, np.bool_)
    step = max(1, BLOCK_BYTES // (math.prod(layers.item) * payload.dtype.itemsize))
    for row in range(0, placement.keep, step):
        end, position = min(row + step, placement.keep), window.start + row
        block = payload.read(placement.skip + row, placement.skip + end)[:, layers.selection]
        block, nulls = conversion.apply(block, source, position)
        target = values[row:end]
        np.copyto(target, block, casting="unsafe")
        if nulls is not None:
            target[nulls] = 0
            valid[row:end] = ~nulls
        if watch is None:
            _check_positions(field, block, position)
        else:
            watch.see(target, None if nulls is None else valid[row:end], position)
    return Rows(field, window.start, values, None if valid.all() else valid)


def _check_positions(field: Field, block: Block, position: int) -> None:
    """A token attends to itself and to those before it."""
    flat = block.reshape(len(block), -1)
    low = -1 if field.pad == -1 else 0
    own = np.arange(position, position + len(block))
    bad_rows = (flat.max(axis=1) > own) | (flat.min(axis=1) < low)
    if bad_rows.any():
        row = int(np.argmax(bad_rows))
        bad = (block[row] > own[row]) | (block[row] < low)
        index = [int(edge) for edge in np.argwhere(bad)[0]]
        value = block[row][tuple(index)].item()
        raise out_of_range(field, value, position + row, index, f"{low} to its own position {position + row}")
