"""What replay changes: experts that differ, and how far the trainer's log-probs are from the rollout's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay.layout import PAD
from arrow_tq.demo.replayed import ReplayedModel

if TYPE_CHECKING:
    from arrow_tq.demo.training import MicroBatch

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one batch, the trainer's weights as they were sent to the engine.

    Attributes:
        forwarded: tokens that the engine forwarded.
        differ_off, differ_on: how many of them get other experts in some layer, without and with replay.
        differ_layer_off: share of (token, layer) pairs that do without replay.
        sampled: tokens compared below.
        gap_off, gap_on: mean absolute difference of log-probs, without and with replay.
        gap_agreeing: without replay, over tokens whose own experts agree in every layer.
        worst_off, worst_on: the largest differences.
        rounding: the same between a bfloat16 and the float32 model here, both with replay: what rounding
            alone makes where all routes agree.
    """

    forwarded: int
    differ_off: int
    differ_on: int
    differ_layer_off: float
    sampled: int
    gap_off: float
    gap_on: float
    gap_agreeing: float
    worst_off: float
    worst_on: float
    rounding: float


def compare(model: ReplayedModel, rounded: ReplayedModel, micros: Sequence[MicroBatch]) -> Comparison:
    """Run forwards with and without replay; gradients and routing stay as they are."""
    rounded.copy_from(model)
    differ_off: list[npt.NDArray[np.bool_]] = []
    differ_on: list[npt.NDArray[np.bool_]] = []
    gap_off, gap_on, rounding, agreeing = [], [], [], []
    with model.no_grad():
        for micro in micros:
            free, free_differs = _forward(model, micro)
            with model.replaying(micro.routing):
                bound, bound_differs = _forward(model, micro)
            with rounded.replaying(micro.routing):
                coarse, _ = _forward(rounded, micro)
            chosen = np.greater(micro.mask, 0)
            gap_off.append(np.abs(free - micro.logprobs)[chosen])
            gap_on.append(np.abs(bound - micro.logprobs)[chosen])
            rounding.append(np.abs(coarse - bound)[chosen])
            # The token at t was drawn from what the router rows up to t - 1 made; its own row is t - 1.
            own = np.zeros(chosen.shape, np.bool_)
            own[:, 1:] = free_differs[:, :-1].max(axis=2)
            agreeing.append(~own[chosen])
            real = _forwarded(micro)
            differ_off.append(free_differs[real])
            differ_on.append(bound_differs[real])
    off, on = np.concatenate(differ_off), np.concatenate(differ_on)
    far, near = np.concatenate(gap_off), np.concatenate(gap_on)
    return Comparison(
        forwarded=len(off),
        differ_off=int(off.any(axis=1).sum()),
        differ_on=int(on.any(axis=1).sum()),
        differ_layer_off=float(off.mean()),
        sampled=len(far),
        gap_off=_mean(far),
        gap_on=_mean(near),
        gap_agreeing=_mean(far[np.concatenate(agreeing)]),
        worst_off=float(far.max(initial=0)),
        worst_on=float(near.max(initial=0)),
        rounding=_mean(np.concatenate(rounding)),
    )


def _forward(model: ReplayedModel, micro: MicroBatch) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Log-probs ``[sequences, length]``, and where experts differ ``[sequences, length, layers]``."""
    with model.observing() as seen:
        logprobs = model.token_logprobs(micro.tokens).numpy().astype(np.float64)
    recorded = np.sort(micro.routing.experts().astype(np.int64), axis=2)
    given = np.stack([seen[layer].numpy() for layer in micro.routing.layer_ids], axis=1)
    differs = (np.sort(given, axis=2) != recorded).any(axis=2)
    return logprobs, differs.reshape(*micro.tokens.shape, -1)


def _forwarded(micro: MicroBatch) -> npt.NDArray[np.bool_]:
    """Positions that the engine forwarded; ``[sequences, length]``."""
    index = micro.routing.layout.index([len(one.tokens) for one in micro.values])
    return np.not_equal(index, PAD).reshape(micro.tokens.shape)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
