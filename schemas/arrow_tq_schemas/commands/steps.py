"""Commands of steps: many commits a message, and taking one back."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field as Bound, model_validator

from arrow_tq_schemas.blobs import StepBlob
from arrow_tq_schemas.chunks import Count
from arrow_tq_schemas.command_base import Command, Mutation, Wire
from arrow_tq_schemas.commands.terms import Json
from arrow_tq_schemas.errors import ArrowTQError, from_wire
from arrow_tq_schemas.receipts import Receipt


class StepCommit(Wire):
    """One step, whole: what its session, its place, its metadata and its receipts are."""

    run: str
    epoch: Count
    session_id: str
    step_id: str
    parent: str | None = None
    """The step before; None: the session's last committed step; ``""``: none, a tree of its own."""
    messages: Json = "[]"
    version: str | None = None
    sampled: tuple[Count, Count] | None = None
    receipts: list[Receipt] = Bound(default_factory=list)
    tools: str | None = None
    """Names the tools that the model could call; None says nothing. A change of it ends the segment."""
    retry_of: str | None = None
    """The step that this one replaces: from now on it and what follows it are superseded."""
    extends: bool = False
    """The messages only add to those before: tokens that differ are a mismatch, not a rewrite."""
    blobs: list[StepBlob] = Bound(default_factory=list)
    """Files that the agent saw, in the order in which they were attached."""

    @model_validator(mode="after")
    def _sampled_ascends(self) -> StepCommit:
        if self.sampled is not None and self.sampled[0] > self.sampled[1]:
            raise ValueError(f"sampled {self.sampled}: expected start <= end")
        return self


class CommitSteps(Command):
    """Many steps in one message, each atomic by itself; idempotent by (session, step id)."""

    verb: ClassVar[str] = "commit_steps"
    mutates: ClassVar[bool] = True
    steps: list[StepCommit]


class StepResult(Wire):
    """What became of one step of ``CommitSteps``: ``error`` is None, or its wire form."""

    step_id: str
    step_index: int = -1
    error: dict[str, object] | None = None

    @property
    def failure(self) -> ArrowTQError | None:
        """The error, if there is one."""
        return None if self.error is None else from_wire(self.error)

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise from_wire(self.error)


class StepResults(Wire):
    results: list[StepResult]


class AbandonStep(Mutation):
    """Leave a step, and all that follows it, out of every view, and free what they wrote."""

    verb: ClassVar[str] = "abandon_step"
    run: str
    epoch: Count
    session_id: str
    step_id: str
