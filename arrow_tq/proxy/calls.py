"""A recorded call, from the agent's request to the answer that it gets."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from arrow_tq.logs import logger
from arrow_tq.proxy.document import Document
from arrow_tq.proxy.exchange import EVENT_STREAM, Exchange
from arrow_tq.proxy.failures import (
    AgentGone,
    EngineFailure,
    StoreFailure,
    TooLarge,
    status_of,
)
from arrow_tq.proxy.forward import Answered, pass_through
from arrow_tq.proxy.headers import (
    RECORDED,
    RUN,
    SESSION,
    START,
    STEP,
    CallNames,
    Headers,
    call_names,
    forwarded,
)
from arrow_tq.proxy.parts import Parts
from arrow_tq.proxy.protocols.base import REQUEST, Answer, Ask, Prompt, Protocol
from arrow_tq.proxy.protocols.chat import told_as_stream, wants_usage
from arrow_tq.proxy.replies import Reply
from arrow_tq.proxy.sessions import SessionState
from arrow_tq.proxy.streams import Stream
from arrow_tq.proxy.work import AskAgain, Work
from arrow_tq_schemas.errors import (
    ArrowTQError,
    Busy,
    DeadlineExceeded,
    InvalidInput,
    SessionClosed,
    Unavailable,
)

ASKED_MAX = 3
"""How often one call may be asked of the engine because its tokens were not as the messages promised."""


class Calls:
    """Handles the calls of recorded routes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def handle(self, exchange: Exchange, protocol: Protocol) -> None:
        """Answer one call; every outcome is an answer, unless the agent is gone."""
        parts, config = self._parts, self._parts.config
        began = time.monotonic()
        try:
            names = call_names(exchange.headers)
            if names is None:
                if config.on_no_session == "refuse":
                    raise InvalidInput(f"header {SESSION.decode()}: a call of this proxy names its session")
                parts.metrics.passed.inc()
                await pass_through(exchange, parts.engine, None)
                return
            if parts.draining:
                raise StoreFailure(Unavailable("the proxy is stopping"))
            if parts.under_way >= config.calls_max:
                raise StoreFailure(Busy(f"calls_max: {config.calls_max} calls are under way"))
            parts.under_way += 1
            try:
                outcome = await self._named(exchange, protocol, names)
            except SessionClosed:
                parts.sessions.drop(names.session)
                raise
            finally:
                parts.under_way -= 1
                parts.metrics.call_s.observe(time.monotonic() - began)
        except AgentGone:
            outcome = "agent-gone"
        except EngineFailure as failure:
            outcome = "engine-failed"
            parts.metrics.engine_failures.labels(failure.error.code).inc()
            self._log("the engine failed a call", failure.error, exchange)
            await self._fail(exchange, failure.status, failure.error)
        except StoreFailure as failure:
            outcome = "store-failed"
            parts.metrics.store_failures.labels("fail").inc()
            self._log("the store failed a call", failure.error, exchange)
            await self._fail(exchange, 503, failure.error)
        except TooLarge as failure:
            outcome = "refused"
            await self._fail(exchange, 413, failure.error)
        except ArrowTQError as error:
            outcome = "refused"
            await self._fail(exchange, status_of(error), error)
        parts.metrics.calls.labels(outcome).inc()

    async def _named(self, exchange: Exchange, protocol: Protocol, names: CallNames) -> str:
        parts = self._parts
        body = await exchange.body(parts.config.request_bytes_max)

        def read() -> Prompt:
            return protocol.read(Document(body, "request", REQUEST))

        prompt = await parts.decoding.maybe(len(body), read)
        try:
            state = await parts.sessions.open(names.session, names.group)
        except StoreFailure as failure:
            if parts.config.on_store_failure == "fail":
                raise
            self._unrecorded(failure.error, exchange)
            await pass_through(exchange, parts.engine, body, (RECORDED, b"no"))
            return "unrecorded"
        async with state.alone(names.step):
            reply = parts.replies.get(names.session, names.step)
            if reply is not None:
                await exchange.answer(200, [*reply.headers, (RECORDED, b"replayed")], reply.body)
                return "replayed"
            work = Work(parts, state, names, prompt)
            call = _Call(self, exchange, protocol, names, state, work, body)
            return await exchange.unless_gone(call.run())

    async def _fail(self, exchange: Exchange, status: int, error: ArrowTQError) -> None:
        if exchange.started:
            # The head is out: the answer is broken off, which no client takes for whole.
            raise Broken(error)
        await exchange.fail(status, error, (RECORDED, b"no"))

    def _unrecorded(self, error: ArrowTQError, exchange: Exchange) -> None:
        self._parts.metrics.store_failures.labels("pass").inc()
        self._log("a call goes unrecorded", error, exchange)

    def _log(self, event: str, error: ArrowTQError, exchange: Exchange) -> None:
        log = logger("arrow_tq.proxy")
        log.warning(event, path=exchange.path, code=error.code, message=error.message)


class Broken(Exception):
    """An answer that had begun cannot be finished."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call while it runs."""

    calls: Calls
    exchange: Exchange
    protocol: Protocol
    names: CallNames
    state: SessionState
    work: Work
    body: bytes

    async def run(self) -> str:
        parts = self.calls._parts
        try:
            async with asyncio.timeout(parts.config.call_s):
                return await self._ask()
        except TimeoutError:
            limit = parts.config.call_s
            late = DeadlineExceeded(f"the call took more than {limit:g} s", deadline_s=limit)
            raise EngineFailure(504, late) from None

    async def _ask(self) -> str:
        """Ask the engine, again where its tokens show that rows are missing."""
        parts, start = self.calls._parts, None
        for _ in range(ASKED_MAX):
            ask = self.work.ask(self.protocol, start)
            try:
                return await self._once(ask)
            except AskAgain as again:
                parts.metrics.again.inc()
                start = again.start
        raise EngineFailure(502, InvalidInput("the engine's token ids differ each time it is asked"))

    async def _once(self, ask: Ask) -> str:
        parts = self.calls._parts
        stream = self.work.streams(self.protocol)

        def prepare() -> tuple[Answer, bytes, bool]:
            request = Document(self.body, "request", REQUEST)
            answer = self.protocol.answer(request, ask)
            return answer, self.protocol.ask(request, ask, stream), wants_usage(request)

        answer, body, usage = await parts.decoding.maybe(len(self.body), prepare)
        async with parts.engine.call("POST", self.exchange.target, self._to_engine(ask), body) as answered:
            if answered.status != 200:
                if self.work.promised and ask.start and answered.status == 400:
                    # A start past the prompt's end: the tokens are not those of the messages before.
                    raise AskAgain(0)
                return await self._hand_back(answered)
            if answered.streams:
                return await Stream(parts, self.exchange, self.work, self.protocol, answer, ask).run(
                    answered, self._head(answered)
                )
            with parts.budget.hold() as hold:
                raw = await answered.body(hold, parts.config.response_bytes_max)
                length = len(raw)
                parts.metrics.engine_bytes.inc(length)
                stripped = await self.work.take(self.protocol, answer, raw)
                del raw
                parts.metrics.stripped_bytes.inc(max(length - len(stripped), 0))
                try:
                    reference = await self.work.record(answer, ask)
                except StoreFailure as failure:
                    if parts.config.on_store_failure == "fail":
                        raise
                    self.calls._unrecorded(failure.error, self.exchange)
                    await self.exchange.answer(200, [*self._head(answered, b"no")], stripped)
                    return "unrecorded"
        return await self._answer(answered, with_reference(stripped, reference), usage)

    async def _answer(self, answered: Answered, body: bytes, usage: bool) -> str:
        head = self._head(answered)
        if self.work.prompt.stream:
            body = b"".join(told_as_stream(body, usage))
            head = [pair for pair in head if pair[0].lower() != b"content-type"] + [EVENT_STREAM]
        self.calls._parts.replies.keep(self.names.session, self.names.step, _reply(head, body))
        await self.exchange.answer(200, head, body)
        return "recorded"

    async def _hand_back(self, answered: Answered) -> str:
        """An engine's refusal or failure, as it is."""
        head = [*forwarded(answered.headers), (RECORDED, b"no")]
        await self.exchange.start(answered.status, head)
        async for piece in answered.pieces():
            await self.exchange.write(piece)
        await self.exchange.end()
        self.calls._parts.metrics.engine_failures.labels(f"http-{answered.status}").inc()
        return "engine-refused"

    def _head(self, answered: Answered, recorded: bytes = b"yes") -> Headers:
        own = [(SESSION, self.names.session.encode()), (STEP, self.work.place.step_id.encode())]
        return [*forwarded(answered.headers, b"content-length"), *own, (RECORDED, recorded)]

    def _to_engine(self, ask: Ask) -> Headers:
        # The body must come uncompressed: it is edited.
        left = forwarded(self.exchange.headers, b"host", b"content-length", b"accept-encoding")
        run = self.state.session.run
        more = [(RUN, run.name.encode()), (START, str(ask.start).encode())]
        return [*left, (b"accept-encoding", b"identity"), *more]


def _reply(head: Headers, body: bytes) -> Reply:
    return Reply([pair for pair in head if pair[0] != RECORDED], body)


def with_reference(body: bytes, reference: bytes) -> bytes:
    """An object's text with the member ``arrow_tq`` at its end."""
    kept = body.rstrip()[:-1].rstrip()
    comma = b"" if kept.endswith(b"{") else b","
    return kept + comma + b'"arrow_tq":' + reference + b"}"
