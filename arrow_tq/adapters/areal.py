"""AReaL: routing as int32 ``[T-1, layers x top-k]`` beside a trajectory's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay.samples import LOGPROB_FIELD, sample_values
from arrow_tq.adapters.replay.source import FIELD
from arrow_tq.adapters.replay.switch import Switch
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.errors import RowCountMismatch


class Trajectory(TypedDict, total=False):
    """Columns of one trajectory."""

    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    routed_experts: npt.NDArray[np.int32]


def trajectories(
    batch: Batch,
    switch: Switch,
    rows: Sequence[int] | None = None,
    logprobs: str = LOGPROB_FIELD,
    routing: str = FIELD,
) -> list[Trajectory]:
    """One a segment; ``[T]`` arrays, 0 over the prompt, and routing where it is on; empty with ``OFF``."""
    chosen = list(range(len(batch))) if rows is None else [int(row) for row in rows]
    if switch is Switch.OFF:
        return [Trajectory() for _ in chosen]
    values = sample_values(batch, chosen, logprobs)
    experts = batch.fetch([routing], rows=chosen)[routing] if switch.has_routing else None
    made = []
    for place, one in enumerate(values):
        prompt = len(one.tokens) - one.response_length
        assert one.logprobs is not None
        trajectory = Trajectory(
            input_ids=one.tokens,
            loss_mask=np.pad(one.loss_mask, (prompt, 0)),
            logprobs=np.pad(one.logprobs, (prompt, 0)),
        )
        if experts is not None:
            trajectory["routed_experts"] = flatten(experts[place])
        made.append(trajectory)
    return made


def flatten(experts: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
    """``[rows, layers, top-k]`` as int32 ``[rows, layers x top-k]``."""
    return np.ascontiguousarray(experts, np.int32).reshape(len(experts), -1)


def unflatten(rows: npt.NDArray[np.int32], layers: int, topk: int) -> npt.NDArray[np.int32]:
    """The other way round. Raises ``RowCountMismatch`` where a row is not layers x top-k wide."""
    if rows.ndim != 2 or rows.shape[1] != layers * topk:
        raise RowCountMismatch(f"rows of shape {list(rows.shape)}: expected [rows, {layers} x {topk}]")
    return rows.reshape(len(rows), layers, topk)
