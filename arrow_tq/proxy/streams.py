"""A recorded call that the engine answers as a stream: events go on as they come, but for the last ones."""

from __future__ import annotations

import json

from arrow_tq.logs import logger
from arrow_tq.proxy.budget import Hold
from arrow_tq.proxy.document import Document
from arrow_tq.proxy.exchange import Exchange
from arrow_tq.proxy.failures import EngineFailure, StoreFailure, error_body
from arrow_tq.proxy.forward import Answered, too_long
from arrow_tq.proxy.headers import RECORDED, Headers
from arrow_tq.proxy.parts import Parts
from arrow_tq.proxy.protocols.base import REFERENCE, Answer, Ask, Protocol
from arrow_tq.proxy.replies import Reply
from arrow_tq.proxy.sse import DONE, Events, data_of, event_of
from arrow_tq.proxy.work import AskAgain, Work
from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage


class Stream:
    """One streamed answer.

    Events are held back from the one that has the finish reason on: they go out when the step is
    committed, so an agent that saw the end can rely on it.
    """

    def __init__(
        self, parts: Parts, exchange: Exchange, work: Work, protocol: Protocol, answer: Answer, ask: Ask
    ) -> None:
        self._parts = parts
        self._exchange = exchange
        self._work = work
        self._protocol = protocol
        self._answer = answer
        self._ask = ask
        self._sent: list[bytes] = []
        self._held: list[bytes] = []
        self._ended = False
        self._refused = False

    async def run(self, answered: Answered, head: Headers) -> str:
        """Pass the stream on and record it; gives the outcome."""
        # That it was recorded is only known at the end: the last event says so.
        head = [pair for pair in head if pair[0] != RECORDED]
        await self._exchange.start(answered.status, head)
        try:
            with self._parts.budget.hold() as hold:
                await self._pass_on(answered, hold)
                if self._refused:
                    await self._finish([])
                    return "engine-refused"
                reference = await self._work.record(self._answer, self._ask)
            await self._finish([reference])
        except AskAgain:
            error = MalformedMessage("the engine's token ids are not those that its answer began with")
            return await self._break("engine-failed", error)
        except EngineFailure as failure:
            self._parts.metrics.engine_failures.labels(failure.error.code).inc()
            return await self._break("engine-failed", failure.error)
        except StoreFailure as failure:
            policy = self._parts.config.on_store_failure
            self._parts.metrics.store_failures.labels(policy).inc()
            if policy == "fail":
                return await self._break("store-failed", failure.error)
            self._log("a call goes unrecorded", failure.error)
            told = {"recorded": False, **json.loads(error_body(failure.error))}
            await self._finish([json.dumps(told).encode("ascii")])
            return "unrecorded"
        except ArrowTQError as error:
            return await self._break("refused", error)
        self._parts.replies.keep(*self._work.key, Reply(head, b"".join(self._sent)))
        return "recorded"

    async def _pass_on(self, answered: Answered, hold: Hold) -> None:
        events, bytes_max = Events(), self._parts.config.response_bytes_max
        async for piece in answered.pieces():
            self._parts.metrics.engine_bytes.inc(len(piece))
            for event in events.feed(piece):
                if len(event) > bytes_max:
                    raise too_long(bytes_max)
                await self._event(event)
            if events.nbytes > bytes_max:
                raise too_long(bytes_max)
            await hold.cover(events.nbytes)
        hold.grown()
        if not self._refused and not (self._answer.found.finished and self._ended):
            raise EngineFailure(502, MalformedMessage("the engine's stream broke off before its end"))

    async def _event(self, event: bytes) -> None:
        place = data_of(event)
        if place is None:
            await self._write(event)
            return
        start, end = place
        data = memoryview(event)[start:end]
        if data == DONE:
            self._ended = True
            await self._write(event)
            return
        stripped = await self._take(data)
        self._parts.metrics.stripped_bytes.inc(max(len(data) - len(stripped), 0))
        await self._write(event[:start] + stripped + event[end:])

    async def _take(self, data: memoryview) -> bytes:
        def work() -> bytes:
            document = Document(data, "an event of the engine's stream", self._protocol.shape)
            if document.root.get("error") is not None:
                self._refused = True
            return self._answer.take(document)

        try:
            return await self._parts.decoding.maybe(len(data), work)
        except ArrowTQError as error:
            raise EngineFailure(502, error) from None

    async def _write(self, event: bytes) -> None:
        if self._answer.found.finished and not self._refused:
            self._held.append(event)
        else:
            self._keep(event)
            await self._exchange.write(event)

    async def _finish(self, references: list[bytes]) -> None:
        """Send what was held back, with the reference in the last event that is an object."""
        for index in range(len(self._held) - 1, -1, -1):
            place = data_of(self._held[index])
            if place is None or self._held[index][place[0] : place[1]] == DONE:
                continue
            for reference in references:
                event, (start, end) = self._held[index], place
                kept = event[start : end - 1].rstrip()
                comma = b"" if kept.endswith(b"{") else b","
                name = b'"' + REFERENCE.encode() + b'":'
                self._held[index] = event[:start] + kept + comma + name + reference + b"}" + event[end:]
            break
        for event in self._held:
            self._keep(event)
        await self._exchange.write(b"".join(self._held))
        await self._exchange.end()

    async def _break(self, outcome: str, error: ArrowTQError) -> str:
        """End the stream with an error, and without its mark of the end."""
        self._log("a stream was broken off", error)
        await self._exchange.write(event_of(error_body(error)))
        await self._exchange.end()
        return outcome

    def _keep(self, event: bytes) -> None:
        if self._work.key[1] is not None:
            self._sent.append(event)

    def _log(self, event: str, error: ArrowTQError) -> None:
        log = logger("arrow_tq.proxy")
        log.warning(event, path=self._exchange.path, code=error.code, message=error.message)
