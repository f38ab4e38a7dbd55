"""Small made-up rollouts with an independent copy of what they hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq import fields
from arrow_tq.producer.session import Session
from arrow_tq_schemas.fields import Field

LAYERS, TOPK, EXPERTS = 6, 2, 64
LAYER_IDS = (1, 2, 4, 5, 6, 9)
"""Dense layers are absent, as in hybrid models."""


def declared_fields() -> list[Field]:
    """Token ids, log-probs, and routing whose layers are stored in two groups."""
    return [
        fields.token_ids(),
        fields.logprobs(),
        fields.routed_experts(
            topk=TOPK, num_experts=EXPERTS, layer_ids=LAYER_IDS, layer_groups=[LAYER_IDS[:2], LAYER_IDS[2:]]
        ),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """What one session holds, kept outside the store.

    ``tokens`` is [T] int32; ``logprobs`` [T] float32, zero outside ``sampled``; ``experts``
    [T - 1, layers, topk] uint8; ``turns`` are (prompt start, prompt end, end) of each step.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    experts: npt.NDArray[np.uint8]
    turns: list[tuple[int, int, int]]


def make_rollout(seed: int, turns: int = 3) -> Rollout:
    """A seeded rollout of a few turns, each a prompt and a completion."""
    random = np.random.default_rng(seed)
    edges, position = [], 0
    for _ in range(turns):
        prompt_end = position + int(random.integers(1, 12))
        end = prompt_end + int(random.integers(1, 20))
        edges.append((position, prompt_end, end))
        position = end
    logprobs = np.zeros(position, np.float32)
    for _, prompt_end, end in edges:
        logprobs[prompt_end:end] = -random.random(end - prompt_end, dtype=np.float32)
    return Rollout(
        random.integers(0, 50_000, position, dtype=np.int32),
        logprobs,
        random.integers(0, EXPERTS, (position - 1, LAYERS, TOPK), dtype=np.uint8),
        edges,
    )


def write_rollout(session: Session, rollout: Rollout, version: str = "1") -> None:
    """Commit one step a turn, routing as int32 as engines send it, each turn's from the first row missing."""
    covered = 0
    for index, (start, prompt_end, end) in enumerate(rollout.turns):
        messages = [{"role": "user", "content": f"turn {index}"}, {"role": "assistant", "content": "ok"}]
        with session.step(
            id=f"call-{index}", messages=messages, version=version, sampled=(prompt_end, end)
        ) as step:
            step.put("token_ids", rollout.tokens[start:end], start=start)
            step.put("logprobs", rollout.logprobs[prompt_end:end], start=prompt_end)
            step.put("routed_experts", rollout.experts[covered : end - 1].astype(np.int32), start=covered)
        covered = end - 1
