"""What stands behind the upstream of the tests: tokens, log-probs and routing.

``Formula`` makes them by arithmetic on token and position, so that a test can know every value by itself, at
any size. ``Model`` runs a real mixture-of-experts model with random weights. Both replay a completion that
they are given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

TURN_START, TURN_END = 256, 257
VOCABULARY = 258
Ids = npt.NDArray[np.int32]
Experts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the routing."""

    layers: int
    topk: int
    experts: int


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """One call's outcome."""

    completion: Ids
    logprobs: npt.NDArray[np.float64]
    experts: Experts
    """``[T - 1 - start, layers, topk]``."""


class Brain(Protocol):
    sizes: Sizes

    def generate(self, prompt: Ids, replay: Ids | None, tokens_max: int, seed: int, start: int) -> Generated:
        """Complete a prompt; ``replay`` is the completion where it is given."""
        ...


class Formula:
    """Routing and log-probs as functions of token, position and layer."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def generate(self, prompt: Ids, replay: Ids | None, tokens_max: int, seed: int, start: int) -> Generated:
        completion = self.complete(prompt, tokens_max, seed) if replay is None else replay
        tokens = np.concatenate([prompt, completion]).astype(np.int32)
        logprobs = logprobs_of(tokens)[len(prompt) :]
        return Generated(completion, logprobs, experts_of(tokens, self.sizes, start))

    def complete(self, prompt: Ids, tokens_max: int, seed: int) -> Ids:
        random = np.random.default_rng([seed, len(prompt), int(prompt.sum())])
        letters = random.integers(97, 123, max(tokens_max - 1, 0)).astype(np.int32)
        return np.append(letters, np.int32(TURN_END)) if tokens_max else letters


class Model:
    """``arrow_tq.demo``'s Qwen3-MoE on the CPU."""

    def __init__(self) -> None:
        from arrow_tq.demo.model import ModelShape, RecordedModel

        shape = ModelShape(VOCABULARY, moe_layers=3, experts=16, topk=4, positions=1 << 14)
        self.sizes = Sizes(shape.moe_layers, shape.topk, shape.experts)
        self._model = RecordedModel(shape)

    def generate(self, prompt: Ids, replay: Ids | None, tokens_max: int, seed: int, start: int) -> Generated:
        context = self._model.start()
        fed = list(context.feed(prompt))
        experts = [piece.experts for piece in fed]
        rng = np.random.default_rng([seed, len(prompt)])
        completion: list[int] = []
        logprobs: list[float] = []
        wanted = tokens_max if replay is None else len(replay)
        while len(completion) < wanted:
            token, logprob = self._model.sample(fed[-1].states, rng)
            if replay is not None:
                token = int(replay[len(completion)])
                logprob = self._model.logprobs(fed[-1].states[-1:], [token])[0]
            completion.append(token)
            logprobs.append(float(logprob))
            if replay is None and token == TURN_END:
                break
            if len(completion) < wanted:
                fed = list(context.feed([token]))
                experts += [piece.experts for piece in fed]
        rows = np.concatenate(experts).astype(np.int32)[start : len(prompt) + len(completion) - 1]
        return Generated(np.array(completion, np.int32), np.array(logprobs), rows)


def experts_of(tokens: Ids, sizes: Sizes, start: int = 0) -> Experts:
    """``[T - 1 - start, layers, topk]``: distinct experts for each token and layer."""
    position = np.arange(start, max(len(tokens) - 1, start), dtype=np.int64)
    first = tokens[start : len(position) + start].astype(np.int64) * 31 + position * 7
    base = first[:, None] + np.arange(sizes.layers, dtype=np.int64) * 13
    ids = base[:, :, None] + np.arange(sizes.topk, dtype=np.int64) * 3
    # Steps of 3 stay distinct where 3 and the number of experts have no common factor.
    return (ids % sizes.experts).astype(np.int32)


def logprobs_of(tokens: Ids) -> npt.NDArray[np.float64]:
    """``[T]``, each exact in float32."""
    position = np.arange(len(tokens), dtype=np.int64)
    return -((tokens.astype(np.int64) * 7 + position) % 1000) / 256.0


def render(messages: Sequence[dict[str, Any]]) -> Ids:
    """A chat's tokens up to where the assistant speaks: bytes, and marks where a turn begins and ends."""
    ids: list[int] = []
    for message in messages:
        ids += [TURN_START, *f"{message['role']}\n".encode(), *said(message), TURN_END]
    return np.array([*ids, TURN_START, *b"assistant\n"], np.int32)


def said(message: dict[str, Any]) -> bytes:
    """A message's own bytes."""
    content = message.get("content") or ""
    calls = message.get("tool_calls")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return (text + (json.dumps(calls, sort_keys=True) if calls else "")).encode("utf-8", "surrogatepass")


def replayed(message: dict[str, Any]) -> Ids:
    """The completion that says a message."""
    return np.array([*said(message), TURN_END], np.int32)


def text_of(ids: Ids) -> str:
    return bytes(ids[ids < 256].astype(np.uint8)).decode("utf-8", "replace")
