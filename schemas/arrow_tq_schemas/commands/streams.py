"""What a commit stream carries: commands of many sessions in one message, answered in one.

A message of steps alone reads like ``CommitSteps``, its answer like ``StepResults``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field as Bound

from arrow_tq_schemas.command_base import Wire
from arrow_tq_schemas.commands.samehost import AdoptChunks, ChunkVerdicts
from arrow_tq_schemas.commands.sessions import FinalizeSession, OpenSession, SegmentInfos, SessionInfo
from arrow_tq_schemas.commands.steps import StepCommit, StepResult
from arrow_tq_schemas.errors import ArrowTQError, from_wire
from arrow_tq_schemas.trusted import trusted

COMMANDS_A_MESSAGE_MAX = 4096
Streamed = AdoptChunks | OpenSession | FinalizeSession
"""Commands that travel beside steps."""


class StreamMessage(Wire):
    """Commands, each atomic and idempotent by itself, taken in the order of these lists."""

    adopts: Annotated[list[AdoptChunks], Bound(max_length=COMMANDS_A_MESSAGE_MAX)] = Bound(
        default_factory=list
    )
    opens: Annotated[list[OpenSession], Bound(max_length=COMMANDS_A_MESSAGE_MAX)] = Bound(
        default_factory=list
    )
    steps: list[StepCommit] = Bound(default_factory=list)
    finalizes: Annotated[list[FinalizeSession], Bound(max_length=COMMANDS_A_MESSAGE_MAX)] = Bound(
        default_factory=list
    )


class StreamAnswer(Wire):
    """The reply to one command, or its error."""

    verdicts: ChunkVerdicts | None = None
    session: SessionInfo | None = None
    segments: SegmentInfos | None = None
    error: dict[str, object] | None = None

    def body(self) -> Wire | None:
        """The reply; raises the error, if there is one."""
        if self.error is not None:
            raise from_wire(self.error)
        return self.verdicts or self.session or self.segments


class StreamAnswers(Wire):
    """One answer an ``adopts``, ``opens`` and ``finalizes``, in this order, and one result a step."""

    results: list[StepResult] = Bound(default_factory=list)
    answers: list[StreamAnswer] = Bound(default_factory=list)


def stream_answer(outcome: Wire | ArrowTQError) -> StreamAnswer:
    """A command's reply, or what it failed by, as it travels."""
    values: dict[str, object] = {"verdicts": None, "session": None, "segments": None, "error": None}
    if isinstance(outcome, ArrowTQError):
        values["error"] = outcome.to_wire()
    elif isinstance(outcome, SessionInfo):
        values["session"] = outcome
    elif isinstance(outcome, SegmentInfos):
        values["segments"] = outcome
    else:
        assert isinstance(outcome, ChunkVerdicts)
        values["verdicts"] = outcome
    return trusted(StreamAnswer, values)
