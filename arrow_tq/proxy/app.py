"""The ASGI application: which request goes where."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from arrow_tq.logs import logger
from arrow_tq.proxy.calls import Broken, Calls
from arrow_tq.proxy.exchange import Exchange, Receive, Scope, Send
from arrow_tq.proxy.failures import AgentGone, EngineFailure, StoreFailure
from arrow_tq.proxy.forward import pass_through
from arrow_tq.proxy.parts import Parts
from arrow_tq.proxy.routes.control import PREFIX, Control
from arrow_tq_schemas.errors import ArrowTQError, InternalError, InvalidInput

OWN = "/arrow-tq"
TEXT_TYPE = (b"content-type", b"text/plain; charset=utf-8")


class ProxyApp:
    """Recorded routes, the proxy's own endpoints, and everything else, which is passed through."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._calls = Calls(parts)
        self._control = Control(parts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._handle(exchange)
        except AgentGone:
            return
        except Broken:
            # Returning without an end makes the server close the connection: nothing looks whole.
            return
        except Exception as error:
            logger("arrow_tq.proxy").error("handler failed", path=exchange.path, exc_info=error)
            if not exchange.started:
                await exchange.fail(500, InternalError(f"{type(error).__name__}: the proxy's log has more"))

    async def _handle(self, exchange: Exchange) -> None:
        path = exchange.path
        if path == OWN or path.startswith(OWN + "/"):
            await self._own(exchange, path)
            return
        protocol = self._parts.routes.get(path)
        if protocol is not None and exchange.method == "POST":
            await self._calls.handle(exchange, protocol)
            return
        self._parts.metrics.passed.inc()
        try:
            await pass_through(exchange, self._parts.engine, None)
        except EngineFailure as failure:
            self._parts.metrics.engine_failures.labels(failure.error.code).inc()
            if exchange.started:
                raise Broken(failure.error) from None
            await exchange.fail(failure.status, failure.error)

    async def _own(self, exchange: Exchange, path: str) -> None:
        if path.startswith(PREFIX):
            await self._control.handle(exchange)
        elif path == f"{OWN}/livez":
            await exchange.answer(200, [TEXT_TYPE], b"ok\n")
        elif path == f"{OWN}/readyz":
            await self._ready(exchange)
        elif path == f"{OWN}/metrics":
            body = self._parts.metrics.text()
            await exchange.answer(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)
        else:
            known = f"{OWN}/livez, /readyz, /metrics, /sessions/ID/..."
            await exchange.fail(404, InvalidInput(f"{path}: this proxy has {known}"))

    async def _ready(self, exchange: Exchange) -> None:
        """Whether calls can be recorded: the store is tried where it was not reached yet."""
        if self._parts.draining:
            await exchange.answer(503, [TEXT_TYPE], b"stopping\n")
            return
        try:
            await self._parts.store.run()
        except StoreFailure as failure:
            await exchange.answer(503, [TEXT_TYPE], f"store: {failure.error.message}\n".encode())
        except ArrowTQError as error:
            await exchange.answer(503, [TEXT_TYPE], f"store: {error.message}\n".encode())
        else:
            await exchange.answer(200, [TEXT_TYPE], b"ok\n")
