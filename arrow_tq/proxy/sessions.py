"""The sessions that calls belong to, and what the proxy remembers of each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from arrow_tq.producer.session import Session
from arrow_tq.proxy.headers import ATTEMPT, CallNames
from arrow_tq.proxy.store_link import StoreLink
from arrow_tq.proxy.tree import Known
from arrow_tq_schemas.errors import SessionClosed

_STEPS = "SELECT step_id, parent_id, status FROM steps WHERE session_id = {name} ORDER BY step_index"


@dataclass(slots=True, eq=False)
class SessionState:
    """One open session.

    Steps are found by the name that the agent gave: a repeated call's later attempt stands in the place of
    the first.
    """

    session: Session
    steps: dict[str, Known] = field(default_factory=dict)
    last: Known | None = None
    attempts: dict[str, int] = field(default_factory=dict)
    """By the agent's name of a call, how many attempts the store may have."""
    firsts: dict[str, str] = field(default_factory=dict)
    """By the agent's name of a call, the id that its retries name: of its first attempt's first step."""
    calls: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    """Calls under way, by the agent's name."""
    commits: dict[str, asyncio.Task[bytes]] = field(default_factory=dict)
    """The last commit of each call under way: it goes on where its agent is gone."""
    under_way: int = 0

    def parent_of(self, names: CallNames) -> Known | None:
        """The step that a call follows, as far as it is known."""
        if names.parent is None:
            return self.last
        if not names.parent:
            return None
        attempt = ATTEMPT.fullmatch(names.parent)
        name = names.parent if attempt is None else attempt["name"]
        return self.steps.get(name) or Known(names.parent, None)

    def commit(self, name: str, step: Known) -> None:
        """Note a step that was committed for the call ``name``."""
        self.steps[name] = step
        self.last = step

    def forget(self, name: str) -> None:
        """A step was left out: it and all that follows it are nobody's parent."""
        gone = self.steps.get(name)
        if gone is None:
            return
        self.steps = {key: one for key, one in self.steps.items() if gone not in one.path()}
        self.last = next(reversed(self.steps.values()), None)

    @asynccontextmanager
    async def alone(self, name: str | None) -> AsyncIterator[None]:
        """One call of this name at a time: the same call again waits for the first."""
        if name is not None:
            while (before := self.calls.get(name)) is not None:
                await asyncio.shield(before)
            self.calls[name] = asyncio.get_running_loop().create_future()
        self.under_way += 1
        try:
            yield
        finally:
            commit = self.commits.pop(name, None) if name is not None else None
            if commit is None or commit.done():
                self._over(name)
            else:
                commit.add_done_callback(lambda _: self._over(name))

    def _over(self, name: str | None) -> None:
        self.under_way -= 1
        if name is not None:
            self.calls.pop(name).set_result(None)


class Sessions:
    """What is remembered, within a bound. What is forgotten is asked of the store again."""

    def __init__(self, store: StoreLink, sessions_max: int, ttl_s: float | None) -> None:
        self._store = store
        self._sessions_max = sessions_max
        self._ttl_s = ttl_s
        self._known: OrderedDict[str, SessionState] = OrderedDict()
        self._opening: dict[str, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self._known)

    def known(self, session_id: str) -> SessionState | None:
        """What is remembered of a session, if anything."""
        return self._known.get(session_id)

    async def open(self, session_id: str, group: str | None = None, **more: object) -> SessionState:
        """The session, opened where it is not.

        Raises:
            StoreFailure: the store cannot say.
            SessionClosed, Conflict, InvalidInput: it has ended, or is open in another group.
        """
        state = self._known.get(session_id)
        if state is not None and (group is None or group == state.session.group) and not more:
            self._known.move_to_end(session_id)
            return state
        lock = self._opening.setdefault(session_id, asyncio.Lock())
        try:
            async with lock:
                return await self._open(session_id, group, more)
        finally:
            if not lock.locked():
                self._opening.pop(session_id, None)

    def drop(self, session_id: str) -> None:
        """Forget a session that ended."""
        self._known.pop(session_id, None)

    async def _open(self, session_id: str, group: str | None, more: dict[str, object]) -> SessionState:
        run = await self._store.run()
        more.setdefault("ttl_s", self._ttl_s)
        session = await self._store.ask(run.session, session_id, group, **more)  # type: ignore[arg-type]
        if session.status != "open":
            # A finalized one opens for its other view; nothing can be recorded in it.
            raise SessionClosed(
                f"session {session_id!r} is {session.status}", session_id=session_id, status=session.status
            )
        state = SessionState(session)
        if session_id not in self._known and session.last_step is not None:
            await self._recall(state)
        # Somebody may have opened it meanwhile: there is one state a session.
        state = self._known.setdefault(session_id, state)
        self._evict()
        return state

    async def _recall(self, state: SessionState) -> None:
        """The ids of steps that are committed already. What they cover is asked of the engine anew."""
        name = "'" + state.session.id.replace("'", "''") + "'"
        rows: pa.Table = await self._store.ask(state.session.run.sql, _STEPS.format(name=name))
        by_id: dict[str, Known] = {}
        seen: set[str] = set()
        for row in rows.to_pylist():
            found = ATTEMPT.fullmatch(row["step_id"])
            named = row["step_id"] if found is None else found["name"]
            state.attempts[named] = max(
                state.attempts.get(named, 0), 1 if found is None else int(found["number"])
            )
            first = f"{row['step_id']}.0"
            state.firsts.setdefault(named, first if first in seen else row["step_id"])
            seen.add(row["step_id"])
            if row["status"] == "committed":
                step = Known(row["step_id"], by_id.get(row["parent_id"]))
                by_id[step.step_id] = step
                state.commit(named, step)

    def _evict(self) -> None:
        for session_id in list(self._known):
            if len(self._known) <= self._sessions_max:
                return
            if not self._known[session_id].under_way:
                del self._known[session_id]
