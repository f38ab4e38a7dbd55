"""Routing and log-probs for trajectories that have none: a model runs over their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.importer.step_tokens import LogProbs, StepTokens

if TYPE_CHECKING:
    from arrow_tq.demo.model import Context, RecordedModel


@dataclass(frozen=True, slots=True, eq=False)
class StepRouting:
    """What a model recorded for one step."""

    start: int
    """Position of the first row of ``experts``."""
    experts: npt.NDArray[np.uint8]
    """``[rows, MoE layers, top-k]``: the passes that this step ran, its last sampled token not among them."""
    logprobs: LogProbs
    """One a sampled token."""


def step_routing(model: RecordedModel, steps: Sequence[StepTokens]) -> list[StepRouting]:
    """Run a session's tokens through the model over one key-value cache; one result a step.

    Steps that only append go in together: what a token is routed to depends on nothing after it. A
    rewrite drops what the cache has from there on.
    """
    context = model.start()
    path = np.empty(0, np.int32)
    found: list[StepRouting] = []
    for stretch in _stretches(steps):
        opening, end = stretch[0], stretch[-1].end
        path = np.concatenate([path[: opening.start], *(step.ids for step in stretch)])
        # The state after the token before the first sampled one is needed: that token goes in again.
        first = min(context.length, opening.start, opening.sampled[0] - 1)
        context.rewind(first)
        experts, logprobs = _feed(model, context, path[first:end], _sampled(stretch, first, end))
        for step in stretch:
            begin, stop = step.sampled
            rows = experts[max(step.start - 1, first) - first : step.end - 1 - first]
            start = step.end - 1 - len(rows)
            found.append(StepRouting(start, rows, logprobs[begin - 1 - first : stop - 1 - first]))
    return found


def _stretches(steps: Sequence[StepTokens]) -> list[list[StepTokens]]:
    """Runs of steps that each begin where the one before ended."""
    stretches: list[list[StepTokens]] = []
    for step in steps:
        if stretches and stretches[-1][-1].end == step.start:
            stretches[-1].append(step)
        else:
            stretches.append([step])
    return stretches


def _sampled(stretch: Sequence[StepTokens], first: int, end: int) -> npt.NDArray[np.bool_]:
    """``[end - 1 - first]``: whether the token after each consumed one was sampled."""
    mask = np.zeros(end - 1 - first, np.bool_)
    for step in stretch:
        mask[step.sampled[0] - 1 - first : step.sampled[1] - 1 - first] = True
    return mask


def _feed(
    model: RecordedModel, context: Context, ids: npt.NDArray[np.int32], sampled: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.uint8], LogProbs]:
    """Rows of every id but the last, and the log-prob of what followed where it was sampled, else 0."""
    pieces: list[npt.NDArray[np.uint8]] = []
    logprobs = np.zeros(len(sampled), np.float32)
    done = 0
    for fed in context.feed(ids[:-1]):
        wanted = np.flatnonzero(sampled[done : done + len(fed.experts)])
        if len(wanted):
            logprobs[done + wanted] = model.logprobs(fed.states[wanted], ids[done + wanted + 1])
        pieces.append(fed.experts)
        done += len(fed.experts)
    return np.concatenate(pieces), logprobs
