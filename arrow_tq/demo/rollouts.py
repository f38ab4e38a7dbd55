"""Rollouts of an agent: several turns of a real model, recorded token by token as it generates.

The agent reads source files of this package. Tokens are bytes, so that no tokenizer is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrow_tq.demo.model import Context, Fed, ModelShape, RecordedModel

TURN_START, TURN_END = 256, 257
VOCABULARY = 258
UNWRITTEN = 255
"""Marks positions of a canvas that no forward pass has filled; no expert has this id."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How much to generate."""

    prompts: int = 4
    samples: int = 4
    """Rollouts a prompt: one group."""
    turns: int = 3
    """Model calls a rollout."""
    seed: int = 0
    prompt_tokens: int = 1500
    result_tokens: int = 500
    """Tokens of a tool's result between two turns."""
    answer_tokens: int = 16
    """Sampled tokens a turn at most."""

    @property
    def tokens_max(self) -> int:
        """Longest rollout."""
        turns = self.turns * (self.answer_tokens + 16)
        return self.prompt_tokens + (self.turns - 1) * self.result_tokens + turns

    def model_shape(self) -> ModelShape:
        return ModelShape(VOCABULARY, moe_layers=4, experts=32, topk=8, hidden=64, positions=self.tokens_max)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutStep:
    """What one model call hands to the store."""

    messages: list[dict[str, object]]
    start: int
    """Position of the first new token."""
    ids: npt.NDArray[np.int32]
    sampled: tuple[int, int]
    logprobs: npt.NDArray[np.float32]
    """One a sampled token."""
    experts_start: int
    experts: npt.NDArray[np.uint8]
    """``[rows, layers, top-k]`` of the tokens that this call consumed."""

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.logprobs.nbytes + self.experts.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Canvas:
    """A rollout's truth: what the model saw, said and routed, written position by position."""

    tokens: npt.NDArray[np.int32]
    """``[T]``"""
    logprobs: npt.NDArray[np.float32]
    """``[T]``, 0 where nothing was sampled."""
    experts: npt.NDArray[np.uint8]
    """``[T, layers, top-k]``; the last row is never written: that token is not forwarded."""

    @classmethod
    def blank(cls, shape: ModelShape) -> Canvas:
        length = shape.positions
        experts = np.full((length, shape.moe_layers, shape.topk), UNWRITTEN, np.uint8)
        return cls(np.zeros(length, np.int32), np.zeros(length, np.float32), experts)

    def save(self, path: Path, length: int) -> None:
        """Write the arrays of a rollout of ``length`` tokens as ``.npz``."""
        np.savez(
            path,
            token_ids=self.tokens[:length],
            logprobs=self.logprobs[:length],
            routed_experts=self.experts[: length - 1],
        )


class Rollout:
    """One rollout in the making; ``steps`` runs the model turn by turn.

    Attributes:
        session_id: ``prompt-0/sample-1``.
        group: ``prompt-0``.
        length: tokens so far.
        canvas: the truth so far.
    """

    def __init__(self, model: RecordedModel, plan: RolloutPlan, prompt: int, sample: int) -> None:
        self.group = f"prompt-{prompt}"
        self.session_id = f"{self.group}/sample-{sample}"
        self.length = 0
        self.canvas = Canvas.blank(model.shape)
        self._model = model
        self._plan = plan
        self._library = _library(prompt, plan)
        self._sampled: list[int] = []
        self._rng = np.random.default_rng([plan.seed, prompt, sample])

    @property
    def reward(self) -> float:
        """Share of the sampled bytes that are printable ASCII."""
        sampled = self.canvas.tokens[self._sampled]
        return round(float(np.mean((sampled >= 32) & (sampled < 127))), 6)

    def steps(self) -> Iterator[RolloutStep]:
        """The rollout's model calls, each as soon as it is made."""
        context = self._model.start()
        for turn in range(self._plan.turns):
            text = self._library[turn]
            role = "user" if turn == 0 else "tool"
            start, consumed = self.length, context.length
            self._append([*_framed(role, text), TURN_START, *b"assistant\n"])
            sampled_start = self.length
            logprobs = self._answer(context)
            ids = self.canvas.tokens[start : self.length].copy()
            answer = bytes(ids[sampled_start - start :][ids[sampled_start - start :] < 256].tolist())
            messages: list[dict[str, object]] = [
                {"role": role, "content": text},
                {"role": "assistant", "content": answer.decode("utf-8", "replace")},
            ]
            experts = self.canvas.experts[consumed : context.length].copy()
            sampled = (sampled_start, self.length)
            yield RolloutStep(messages, start, ids, sampled, logprobs, consumed, experts)

    def _answer(self, context: Context) -> npt.NDArray[np.float32]:
        """Sample until the end mark or the plan's bound; log-probs of the sampled tokens."""
        logprobs: list[np.float32] = []
        while True:
            fed = self._consume(context)
            token, logprob = self._model.sample(fed.states, self._rng)
            self.canvas.logprobs[self.length] = logprob
            self._sampled.append(self.length)
            self._append([token])
            logprobs.append(logprob)
            if token == TURN_END or len(logprobs) == self._plan.answer_tokens:
                return np.array(logprobs, np.float32)

    def _consume(self, context: Context) -> Fed:
        """Forward every token that the model has not seen; their routing goes onto the canvas."""
        pieces = context.feed(self.canvas.tokens[context.length : self.length])
        at = context.length
        for fed in pieces:
            self.canvas.experts[at : at + len(fed.experts)] = fed.experts
            at += len(fed.experts)
        return fed

    def _append(self, ids: list[int]) -> None:
        self.canvas.tokens[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


def rollouts(model: RecordedModel, plan: RolloutPlan) -> Iterator[Rollout]:
    """Every sample of every prompt."""
    for prompt in range(plan.prompts):
        for sample in range(plan.samples):
            yield Rollout(model, plan, prompt, sample)


def _framed(role: str, text: str) -> list[int]:
    return [TURN_START, *role.encode(), *b"\n", *text.encode(), TURN_END]


def _library(prompt: int, plan: RolloutPlan) -> list[str]:
    """The prompt and the tools' results: excerpts of this package's own source files."""
    sources = sorted(Path(__file__).parents[1].glob("*.py"))
    texts = []
    for turn in range(plan.turns):
        path = sources[(prompt + turn) % len(sources)]
        length = plan.prompt_tokens if turn == 0 else plan.result_tokens
        head = f"Explain {path.name} of arrow-tq:\n" if turn == 0 else f"$ cat {path.name}\n"
        body = path.read_text(encoding="utf-8").encode("ascii", "replace").decode()
        texts.append((head + body * (length // max(len(body), 1) + 1))[: length - 8])
    return texts
