"""``/arrow-tq/sessions/...``: open, look at, finalize, abort; rewards; steps that are abandoned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError

from arrow_tq.producer.session import Session
from arrow_tq.proxy.exchange import JSON_TYPE, Exchange
from arrow_tq.proxy.failures import StoreFailure, status_of
from arrow_tq.proxy.parts import Parts
from arrow_tq_schemas.chunks import explain
from arrow_tq_schemas.commands import SegmentInfo, SessionInfo
from arrow_tq_schemas.errors import ArrowTQError, InvalidInput, NotFound
from arrow_tq_schemas.names import check_session

PREFIX = "/arrow-tq/sessions/"
BODY_BYTES_MAX = 4 << 20
View = Literal["lineage", "timeline"]
Reward = Annotated[float, Bound(allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Kind = TypeVar("Kind", bound=_Body)


class OpenBody(_Body):
    """A session to open, before its first call or instead of by its headers."""

    group: str | None = None
    tasks: list[str] | None = None
    ttl_s: float | None = None
    columns: dict[str, object] = {}


class FinalizeBody(_Body):
    view: View = "lineage"
    reward: Reward | None = None
    columns: dict[str, object] = {}


class RewardBody(_Body):
    """A reward, or other columns, that came after finalize."""

    view: View = "lineage"
    reward: Reward | None = None
    columns: dict[str, object] = {}


class AbortBody(_Body):
    reason: str = "aborted"


class Control:
    """Answers what agents and their environments say of sessions."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._verbs: dict[tuple[str, str], Callable[[str, bytes], Awaitable[object]]] = {
            ("POST", "open"): self._open,
            ("POST", "finalize"): self._finalize,
            ("POST", "abort"): self._abort,
            ("POST", "reward"): self._reward,
        }

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request below ``/arrow-tq/sessions/``."""
        try:
            body = await exchange.body(BODY_BYTES_MAX)
            reply = await self._reply(exchange, body)
        except StoreFailure as failure:
            self._parts.metrics.store_failures.labels("fail").inc()
            await exchange.fail(503, failure.error)
        except ArrowTQError as error:
            await exchange.fail(status_of(error), error)
        else:
            await exchange.answer(200, [JSON_TYPE], json.dumps(reply).encode("ascii"))

    async def _reply(self, exchange: Exchange, body: bytes) -> object:
        # Ids may have slashes, escaped ones too: the verb is what comes last in the path as it was sent.
        rest = exchange.target.partition(b"?")[0].decode("latin-1").removeprefix(PREFIX)
        if exchange.method == "GET":
            return await self._look(unquote(rest))
        name, _, verb = rest.rpartition("/")
        if exchange.method == "POST" and verb == "abandon" and "/steps/" in name:
            session, _, step = name.rpartition("/steps/")
            return await self._abandon(unquote(session), unquote(step))
        act = self._verbs.get((exchange.method, verb))
        if act is None or not name:
            raise NotFound(
                f"{exchange.method} {exchange.path}: expected GET {PREFIX}ID, or POST {PREFIX}ID/open, "
                "/finalize, /abort, /reward or /steps/STEP/abandon"
            )
        return await act(unquote(name), body)

    async def _open(self, session_id: str, body: bytes) -> object:
        asked = _parse(OpenBody, body)
        more: dict[str, object] = dict(asked.columns)
        if asked.tasks is not None:
            more["tasks"] = asked.tasks
        if asked.ttl_s is not None:
            more["ttl_s"] = asked.ttl_s
        await self._parts.sessions.open(session_id, asked.group, **more)
        return await self._look(session_id)

    async def _look(self, session_id: str) -> object:
        state = self._parts.sessions.known(session_id)
        if state is None:
            raise NotFound(f"session {session_id!r}: no call of this proxy named it", session_id=session_id)
        last = state.last
        return {
            "session": session_id,
            "run": state.session.run.name,
            "group": state.session.group,
            "steps": [step.step_id for step in state.steps.values()],
            "last_step": None if last is None else last.step_id,
            "tokens": 0 if last is None else last.end,
            "calls_under_way": state.under_way,
        }

    async def _finalize(self, session_id: str, body: bytes) -> object:
        asked = _parse(FinalizeBody, body)
        session = await self._session(session_id)
        segments = await self._parts.store.ask(session.finalize, asked.view, asked.reward, **asked.columns)
        self._over(session_id)
        return {"session": session_id, "view": asked.view, "segments": [_told(one) for one in segments]}

    async def _abort(self, session_id: str, body: bytes) -> object:
        asked = _parse(AbortBody, body)
        session = await self._session(session_id)
        await self._parts.store.ask(session.abort, asked.reason)
        self._over(session_id)
        return {"session": session_id, "aborted": True}

    async def _reward(self, session_id: str, body: bytes) -> object:
        asked = _parse(RewardBody, body)
        columns = dict(asked.columns)
        if asked.reward is not None:
            columns["reward"] = asked.reward
        run = await self._parts.store.run()
        count = await self._parts.store.ask(run.update, [session_id], asked.view, **columns)
        return {"session": session_id, "segments": count}

    async def _abandon(self, session_id: str, step: str) -> object:
        state = await self._parts.sessions.open(session_id)
        known = state.steps.get(step)
        count = await self._parts.store.ask(state.session.abandon, step if known is None else known.step_id)
        state.forget(step)
        return {"session": session_id, "steps": count}

    async def _session(self, session_id: str) -> Session:
        """A handle for a session in whatever state it is; its commits under way are waited for."""
        state = self._parts.sessions.known(session_id)
        if state is not None and state.commits:
            await asyncio.wait(list(state.commits.values()))
        run = await self._parts.store.run()
        name = check_session(session_id)
        return Session(run, SessionInfo(session_id=name, group=None, status="", last_step=None, ends={}))

    def _over(self, session_id: str) -> None:
        state = self._parts.sessions.known(session_id)
        if state is not None:
            self._parts.replies.forget_session(session_id, list(state.attempts))
        self._parts.sessions.drop(session_id)


def _told(segment: SegmentInfo) -> dict[str, object]:
    return segment.model_dump(mode="json")


def _parse(kind: type[Kind], body: bytes) -> Kind:
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise InvalidInput(f"request body: {explain(error)}") from None
