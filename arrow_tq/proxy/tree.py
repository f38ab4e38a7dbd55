"""What a session's steps cover, as its proxy knows it: enough to ask the engine for what is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Known:
    """A committed step. Of one that another process committed only the id is known."""

    step_id: str
    parent: Known | None
    end: int = 0
    """Tokens on its path."""
    digest: bytes = b""
    """Of those tokens."""
    covered: int = 0
    """First position whose row of routing its path does not have."""
    messages: int = 0
    """Messages that its request had."""
    messages_digest: bytes = b""

    def path(self) -> Iterator[Known]:
        """This step and those before it, back to the root."""
        step: Known | None = self
        while step is not None:
            yield step
            step = step.parent

    def begins(self, tokens: Tokens) -> bool:
        """Whether its path's tokens are the first of these."""
        return 0 < self.end <= len(tokens) and digest_of(tokens[: self.end]) == self.digest

    def begins_messages(self, messages: Sequence[object]) -> bool:
        """Whether its request's messages are the first of these."""
        return 0 < self.messages <= len(messages) and (
            messages_digest(messages[: self.messages]) == self.messages_digest
        )


@dataclass(frozen=True, slots=True)
class Base:
    """What is there already of a call's tokens."""

    step: Known | None
    tokens: int
    """Positions before this are on the step's path."""
    covered: int
    """Rows of routing before this are too."""


NOTHING = Base(None, 0, 0)


def base_of_tokens(parent: Known | None, tokens: Tokens) -> Base:
    """The longest path, of the parent or a step before it, that these tokens begin with."""
    for step in parent.path() if parent is not None else ():
        if step.begins(tokens):
            return Base(step, step.end, min(step.covered, step.end))
    return NOTHING


def base_of_messages(parent: Known | None, messages: Sequence[object]) -> Base:
    """The same, as the messages promise it: only the engine's tokens will tell."""
    for step in parent.path() if parent is not None else ():
        if step.end and step.begins_messages(messages):
            return Base(step, step.end, min(step.covered, step.end))
    return NOTHING


def digest_of(tokens: Tokens) -> bytes:
    """A name for these tokens."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(tokens, np.int32).data)


def messages_digest(messages: Sequence[object]) -> bytes:
    """A name for these messages."""
    text = json.dumps(messages, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).digest()
