"""A session: one rollout, made of steps, that ends as segments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from arrow_tq.calls import ask, checked, columns_json, messages_json
from arrow_tq.producer.branch import Branch, tools_name
from arrow_tq.producer.step import Step
from arrow_tq_schemas.commands import (
    AbandonStep,
    AbortSession,
    Done,
    FinalizeSession,
    SegmentInfo,
    SegmentInfos,
    SessionInfo,
    View,
    new_request_id,
)
from arrow_tq_schemas.errors import InvalidInput, SessionClosed
from arrow_tq_schemas.names import check_id

if TYPE_CHECKING:
    from arrow_tq.runs import Run


class Session:
    """One rollout. Made by ``run.session``; its steps form a tree. Thread-safe.

    A step follows the session's last committed step unless it names another ``parent``, which begins a
    branch. To suspend a rollout, leave its session open; ``run.session(id)`` resumes it, in any process.

    Attributes:
        id: the session's id.
        run: the run it belongs to.
    """

    def __init__(self, run: Run, info: SessionInfo) -> None:
        self.run = run
        self.id = info.session_id
        self._info = info
        self._shard: int | None = None

    @property
    def group(self) -> str | None:
        """The group it belongs to; None: none."""
        return self._info.group

    @property
    def status(self) -> str:
        """``open``, or ``finalized`` (only its other view can follow), as of when it was opened here."""
        return self._info.status

    @property
    def ends(self) -> dict[str, int]:
        """By field, the first position not covered yet, as of when the session was opened."""
        return dict(self._info.ends)

    @property
    def last_step(self) -> str | None:
        """Id of the last committed step that counts, as of when the session was opened; None: none yet."""
        return self._info.last_step

    def pin_shard(self, number: int | None = None) -> int:
        """Keep what this object writes from now on together on one shard, and say which.

        Otherwise each put goes where there is most room, on this host if it can.

        Args:
            number: the shard; None chooses one now.
        """
        self._shard = self.run.backend.shard() if number is None else number
        return self._shard

    def shard(self) -> int:
        """Shard number for the next new chunk."""
        return self.run.backend.shard() if self._shard is None else self._shard

    def step(
        self,
        id: str | None = None,
        parent: str | None = None,
        messages: Iterable[object] = (),
        version: str | None = None,
        sampled: tuple[int, int] | None = None,
        *,
        tools: object = None,
        retry_of: str | None = None,
        extends: bool = False,
    ) -> Step:
        """A model call, to be used as a context manager: it commits whole on exit, or leaves nothing.

        Args:
            id: the caller's id, so that a retried call is stored once; made up when left out.
            parent: the step before; None is the session's last committed step, ``""`` is none: the step
                begins a tree of its own.
            messages: the *new* chat messages, JSON-safe.
            version: weight version that sampled, an opaque string.
            sampled: half-open absolute range of the sampled tokens; None: nothing was sampled.
            tools: what the model could call, JSON-safe, or a name for it; where it differs from the steps
                before, their segment ends. None says nothing.
            retry_of: id of an attempt that this step replaces, committed or not: it and what followed it
                are superseded, and count no more. The step goes where that one went.
            extends: the messages only add to those before. Token ids that differ all the same end the
                segment with ``mismatch`` instead of ``rewrite``.

        Raises:
            SessionClosed: the session was finalized when it was opened here.
        """
        if self.status != "open":
            raise SessionClosed(
                f"session {self.id!r} is {self.status}: it takes no more steps",
                session_id=self.id,
                status=self.status,
            )
        step_id = new_request_id() if id is None else check_id(id, "step id")
        if parent:
            check_id(parent, "parent step id")
        if version is not None:
            check_id(version, "version")
        if sampled is not None:
            sampled = _range(sampled)
        if retry_of is not None and check_id(retry_of, "retried step id") == step_id:
            raise InvalidInput(f"step {step_id!r} retries itself: a retry has an id of its own")
        branch = Branch(parent, retry_of, None if tools is None else tools_name(tools), extends)
        return Step(self, step_id, branch, messages_json(messages), version, sampled)

    def abandon(self, step_id: str) -> int:
        """Leave a step, and all that follows it, out of every view, and free what they wrote.

        The session's last committed step is then the last one that still counts. Says how many steps this
        left out; again, none.

        Raises:
            NotFound: the session has no such step.
            SessionClosed: it has ended.
        """
        command = AbandonStep(
            run=self.run.name,
            epoch=self.run.epoch,
            session_id=self.id,
            step_id=check_id(step_id, "step id"),
        )
        return ask(self.run.backend, command, Done).count

    def finalize(
        self, view: View = "lineage", reward: float | None = None, **columns: object
    ) -> list[SegmentInfo]:
        """Compose the session's segments of one view. Reads no payload. Idempotent for the same arguments.

        The first view ends the session; the other one can follow until segments of the first are released,
        from any process: ``run.session(id).finalize("timeline")``.

        Args:
            view: ``lineage``: one segment a leaf of the tree; ``timeline``: snapshots in time order.
            reward: of this view's segments.
            columns: further columns of this view's segments.

        Raises:
            SessionClosed: it was aborted or discarded, or has expired; or this view was finalized with
                another reward or other columns.
            ChunkReleased: segments of the other view were released or discarded already.
        """
        with checked(f"finalize {self.id!r}"):
            command = FinalizeSession(
                run=self.run.name,
                epoch=self.run.epoch,
                session_id=self.id,
                view=view,
                reward=None if reward is None else float(reward),
                columns=columns_json(columns),
            )
        return ask(self.run.backend, command, SegmentInfos).segments

    def abort(self, reason: str = "aborted") -> None:
        """End the session and free everything that it wrote."""
        command = AbortSession(
            run=self.run.name, epoch=self.run.epoch, session_id=self.id, reason=check_id(reason, "reason")
        )
        ask(self.run.backend, command, Done)

    async def afinalize(
        self, view: View = "lineage", reward: float | None = None, **columns: object
    ) -> list[SegmentInfo]:
        return await self.run.threads.call(self.finalize, view, reward, **columns)

    async def aabandon(self, step_id: str) -> int:
        return await self.run.threads.call(self.abandon, step_id)

    async def aabort(self, reason: str = "aborted") -> None:
        await self.run.threads.call(self.abort, reason)

    def __repr__(self) -> str:
        return f"Session({self.id!r} of run {self.run.name!r})"


def _range(sampled: tuple[int, int]) -> tuple[int, int]:
    try:
        start, end = (int(edge) for edge in sampled)
    except (TypeError, ValueError):
        raise InvalidInput(f"sampled {sampled!r}: expected (start, end)") from None
    if not 0 <= start <= end:
        raise InvalidInput(f"sampled {sampled!r}: expected 0 <= start <= end")
    return start, end
