"""Signs that routing was not captured: zeros where a router must choose several experts, stale rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.payload import Block
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.fields import Field

ZERO_ROWS_MAX = 64
"""With one expert a token, a layer may choose expert 0 this many times running and not be refused."""


class RoutingWatch:
    """Sees every block of rows once, in order, and refuses what no router can have chosen.

    The top-k experts of a token are distinct, so with k > 1 a layer that is zero throughout, or a row that
    is zero in every layer, was never written. Dense layers are dropped before.
    """

    def __init__(self, field: Field, place: str, identical_rows_max: int | None) -> None:
        self._field = field
        self._place = place
        self._identical_rows_max = identical_rows_max
        self._blind = field.num_experts == 1
        self._seen = np.zeros(field.shape, field.type.numpy)
        self._rows = 0
        self._last: Block | None = None
        self._run = 0

    def see(self, block: Block, valid: npt.NDArray[np.bool_] | None, position: int) -> None:
        """``block`` is ``[n, layers, topk]`` in the storage dtype, null rows zero.

        Raises:
            MalformedMessage: an unwritten row, or a longer run of equal rows than is allowed.
        """
        if self._blind or not len(block):
            return
        self._seen |= np.bitwise_or.reduce(block, axis=0)
        self._rows += len(block) if valid is None else int(np.count_nonzero(valid))
        flat = block.reshape(len(block), -1)
        if self._field.shape[-1] > 1:
            self._refuse_unwritten(flat, valid, position)
        if self._identical_rows_max is not None:
            self._refuse_stale(flat, valid, position, self._identical_rows_max)

    def finish(self) -> None:
        """Raises ``MalformedMessage`` for layers that were zero in every row."""
        enough = self._rows > (ZERO_ROWS_MAX if self._field.shape[-1] == 1 else 0)
        unwritten = np.flatnonzero(~self._seen.any(axis=1)).tolist()
        if self._blind or not enough or not unwritten:
            return
        layers = [(self._field.layer_ids or ())[index] for index in unwritten]
        raise MalformedMessage(
            f"{self._place}: layers {layers} chose expert 0 alone in all {self._rows} rows: their routing "
            f"was not captured (dense layers: leave them out of field {self._field.name!r})",
            field=self._field.name,
            layers=layers,
            rows=self._rows,
        )

    def _refuse_unwritten(self, flat: Block, valid: npt.NDArray[np.bool_] | None, position: int) -> None:
        unwritten = ~flat.any(axis=1)
        if valid is not None:
            unwritten &= valid
        if unwritten.any():
            first = position + int(np.argmax(unwritten))
            raise MalformedMessage(
                f"{self._place}: the row of position {first} is expert 0 in every layer: its routing was not "
                "captured",
                field=self._field.name,
                position=first,
                rows=int(np.count_nonzero(unwritten)),
            )

    def _refuse_stale(
        self, flat: Block, valid: npt.NDArray[np.bool_] | None, position: int, limit: int
    ) -> None:
        same: npt.NDArray[np.bool_] = np.empty(len(flat), np.bool_)
        same[0] = self._last is not None and np.array_equal(self._last, flat[0])
        np.all(flat[1:] == flat[:-1], axis=1, out=same[1:])
        if valid is not None:
            # A null row is no row: the one after it begins a run, even where both read as zeros.
            same &= valid
            same[1:] &= valid[:-1]
        index = np.arange(len(flat))
        broken = np.maximum.accumulate(np.where(same, -1, index))
        runs = np.where(broken < 0, self._run + index + 1, index - broken + 1)
        self._run = int(runs[-1])
        self._last = flat[-1].copy() if valid is None or valid[-1] else None
        if runs.max() > limit:
            end = int(np.argmax(runs > limit))
            first = position + end - limit
            raise MalformedMessage(
                f"{self._place}: from position {first} on more than {limit} rows are equal in every layer: a "
                "stale buffer (identical_rows_max of the policy is the bound)",
                field=self._field.name,
                position=first,
                identical_rows_max=limit,
            )
