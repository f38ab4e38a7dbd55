"""Opening a session, and waiting for room in a store that is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from arrow_tq.calls import ask, checked, columns_json
from arrow_tq.producer.session import Session
from arrow_tq_schemas.commands import OpenSession, SessionInfo
from arrow_tq_schemas.errors import StoreFull
from arrow_tq_schemas.names import check_id, check_session

if TYPE_CHECKING:
    from arrow_tq.runs import Run

ROOM_POLL_S = 0.25
"""How often a session that waits for room asks again."""


class Opening:
    """One session to be opened; the arguments are those of ``run.session``."""

    def __init__(
        self,
        run: Run,
        id: str,
        group: str | None,
        tasks: Iterable[str] | None,
        ttl_s: float | None,
        columns: dict[str, object],
    ) -> None:
        self._run = run
        with checked(f"session {id!r}"):
            self._command = OpenSession(
                run=run.name,
                epoch=run.epoch,
                session_id=check_session(id),
                group=None if group is None else check_id(group, "group"),
                tasks=None if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks),
                ttl_s=ttl_s,
                columns=columns_json(columns),
            )

    def wait(self, wait_s: float) -> Session:
        """The session; waits for room at most so long before ``StoreFull``."""
        until = time.monotonic() + wait_s
        while (session := self._attempt(until)) is None:
            time.sleep(_pause_s(until))
        return session

    async def await_room(self, wait_s: float) -> Session:
        """As ``wait``."""
        until = time.monotonic() + wait_s
        # The wait holds no thread: those are for calls that can go on, which may be what makes room.
        while (session := await self._run.threads.call(self._attempt, until)) is None:
            await asyncio.sleep(_pause_s(until))
        return session

    def _attempt(self, until: float) -> Session | None:
        """The session; None where there is no room and time is left (``until`` is monotonic)."""
        left = max(until - time.monotonic(), 0.0)
        command = self._command.model_copy(update={"wait_s": left}) if left else self._command
        try:
            info = ask(self._run.backend, command, SessionInfo)
        except StoreFull:
            if left <= 0:
                raise
            return None
        return Session(self._run, info)


def _pause_s(until: float) -> float:
    return min(ROOM_POLL_S, max(until - time.monotonic(), 0.0))
