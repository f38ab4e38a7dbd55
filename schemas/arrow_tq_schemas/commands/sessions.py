"""Commands of sessions: opening, ending, and reading one as it was written."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field as Bound

from arrow_tq_schemas.blobs import StepBlob
from arrow_tq_schemas.chunks import Count
from arrow_tq_schemas.command_base import Command, Mutation, Seconds, Wire
from arrow_tq_schemas.commands.terms import Json, Names, View
from arrow_tq_schemas.receipts import Receipt


class OpenSession(Mutation):
    """Create a session, or open it again where it is still open.

    One that is finalized is opened by its id alone, so that its other view can be finalized.

    ``tasks=None`` means every task of the run, ``[]`` none (evaluation); past ``ttl_s`` an unfinished
    session, or a finished one without tasks, expires.
    """

    verb: ClassVar[str] = "open_session"
    run: str
    epoch: Count
    session_id: str
    group: str | None = None
    tasks: Names | None = None
    ttl_s: Seconds | None = None
    columns: Json = "{}"
    wait_s: Seconds = 0.0
    """How much longer the caller will ask again where there is no room: it counts as a waiter."""


class SessionInfo(Wire):
    session_id: str
    group: str | None
    status: str
    last_step: str | None
    ends: dict[str, int]
    """By field, the first position not covered yet (the largest end)."""


class FinalizeSession(Mutation):
    """Compose the session's segments of one view. Reads no payload. Each view can be finalized once."""

    verb: ClassVar[str] = "finalize_session"
    run: str
    epoch: Count
    session_id: str
    view: View = "lineage"
    reward: Annotated[float, Bound(allow_inf_nan=False)] | None = None
    columns: Json = "{}"


class SegmentInfo(Wire):
    segment_id: str
    session_id: str
    num_tokens: int
    loss_tokens: int
    complete_fields: Names
    finish_reason: str


class SegmentInfos(Wire):
    segments: list[SegmentInfo]


class AbortSession(Mutation):
    """End an open session and free everything it wrote."""

    verb: ClassVar[str] = "abort_session"
    run: str
    epoch: Count
    session_id: str
    reason: str = "aborted"


class GetSession(Command):
    """A session as it was written, with a page of its steps from ``first_step`` on: for an export."""

    verb: ClassVar[str] = "get_session"
    run: str
    session_id: str
    first_step: Count = 0


class FinalizedView(Wire):
    """How a session was finalized in one view."""

    view: View
    reward: float | None
    columns: Json


class RecordedStep(Wire):
    """A step that counts; ``parent`` is empty for one that begins a tree. As in ``StepCommit``."""

    step_id: str
    parent: str
    messages: Json
    version: str | None
    sampled: tuple[Count, Count] | None
    receipts: list[Receipt]
    tools: str | None
    retry_of: str | None
    extends: bool
    blobs: list[StepBlob] = Bound(default_factory=list)


class SessionRecord(Wire):
    """A session; ``versions`` are those of its run, in their order; ``next_step`` is None at the end."""

    session_id: str
    group: str | None
    status: str
    tasks: Names
    columns: Json
    views: list[FinalizedView]
    versions: Names
    steps: list[RecordedStep]
    next_step: Count | None
