"""A session: one rollout, made of steps, that ends as segments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from arrow_tq.calls import ask, checked, columns_json, messages_json
from arrow_tq.producer.step import Step
from arrow_tq_schemas.commands import (
    AbortSession,
    Done,
    FinalizeSession,
    SegmentInfo,
    SegmentInfos,
    SessionInfo,
    View,
    new_request_id,
)
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.names import check_id

if TYPE_CHECKING:
    from arrow_tq.runs import Run


class Session:
    """One rollout. Made by ``run.session``; its steps form a chain, each after the one before.

    Attributes:
        id: the session's id.
        run: the run it belongs to.
    """

    def __init__(self, run: Run, info: SessionInfo) -> None:
        self.run = run
        self.id = info.session_id
        self._info = info

    @property
    def group(self) -> str | None:
        return self._info.group

    @property
    def ends(self) -> dict[str, int]:
        """By field, the first position not covered yet, as of when the session was opened."""
        return dict(self._info.ends)

    def step(
        self,
        id: str | None = None,
        parent: str | None = None,
        messages: Iterable[object] = (),
        version: str | None = None,
        sampled: tuple[int, int] | None = None,
    ) -> Step:
        """A model call, to be used as a context manager: it commits whole on exit, or leaves nothing.

        Args:
            id: the caller's id, so that a retried step is stored once; made up when left out.
            parent: the step before; None is the session's last committed step.
            messages: the *new* chat messages, JSON-safe.
            version: weight version that sampled, an opaque string.
            sampled: half-open absolute range of the sampled tokens; None: nothing was sampled.
        """
        step_id = new_request_id() if id is None else check_id(id, "step id")
        if parent is not None:
            check_id(parent, "parent step id")
        if version is not None:
            check_id(version, "version")
        if sampled is not None:
            sampled = _range(sampled)
        return Step(self, step_id, parent, messages_json(messages), version, sampled)

    def finalize(
        self, view: View = "lineage", reward: float | None = None, **columns: object
    ) -> list[SegmentInfo]:
        """Compose the session's segments. Reads no payload. Idempotent for the same arguments.

        Raises:
            SessionClosed: it was aborted or discarded, or has expired.
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
