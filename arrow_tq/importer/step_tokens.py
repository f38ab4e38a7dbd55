"""The token positions of a trajectory's steps: append-only where it is tokenised, as given where ids are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.importer.chat_tokenizer import ChatTokenizer
from arrow_tq.importer.trajectory import GivenTokens, Trajectory

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """What one step puts."""

    start: int
    """Position of the first token to put: the end so far, or where the history was rewritten."""
    ids: TokenIds
    """``[end - start]``."""
    sampled: tuple[int, int]
    """Half-open absolute range of the sampled tokens."""
    logprobs: LogProbs | None = None
    """One a sampled token, where the file has them."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def step_tokens(trajectory: Trajectory, tokenizer: ChatTokenizer | None) -> list[StepTokens]:
    """One ``StepTokens`` a turn; ``tokenizer`` may be None where the file has the ids."""
    given = [turn.given for turn in trajectory.turns if turn.given is not None]
    if len(given) == len(trajectory.turns):
        return _given_steps(given)
    assert tokenizer is not None
    return _tokenised_steps(trajectory, tokenizer)


def _tokenised_steps(trajectory: Trajectory, tokenizer: ChatTokenizer) -> list[StepTokens]:
    """Every turn's prompt is exactly the tokens before it and those of its new messages."""
    steps: list[StepTokens] = []
    end = 0
    for index, turn in enumerate(trajectory.turns):
        prompt = [] if index == 0 else list(tokenizer.line_break)
        prompt += tokenizer.context(turn.messages[:-1])
        prompt += tokenizer.opening(str(turn.messages[-1]["role"]))
        answer = tokenizer.answer(turn.messages[-1])
        start, sampled = end, end + len(prompt)
        end = sampled + len(answer)
        steps.append(StepTokens(start, np.array(prompt + answer, np.int32), (sampled, end)))
    return steps


def _given_steps(turns: Sequence[GivenTokens]) -> list[StepTokens]:
    """Each call's own ids, from the first position where they differ from what is there."""
    steps: list[StepTokens] = []
    before = np.empty(0, np.int32)
    for given in turns:
        whole = np.array(given.prompt + given.completion, np.int32)
        start = min(_common_prefix(before, whole), len(given.prompt))
        sampled = (len(given.prompt), len(whole))
        logprobs = None if given.logprobs is None else np.array(given.logprobs, np.float32)
        steps.append(StepTokens(start, whole[start:], sampled, logprobs))
        before = whole
    return steps


def _common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many leading ids are equal."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length
