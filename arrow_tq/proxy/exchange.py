"""One HTTP request and its answer, on ASGI's messages: bytes and headers as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from arrow_tq.proxy.failures import AgentGone, TooLarge, error_body
from arrow_tq.proxy.headers import Headers
from arrow_tq_schemas.errors import ArrowTQError, InvalidInput

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Result = TypeVar("Result")

JSON_TYPE = (b"content-type", b"application/json")
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
RETRY_AFTER = (b"retry-after", b"1")


class Exchange:
    """A request that is read, and an answer that is written.

    Attributes:
        started: whether the answer's head is out.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._whole = False
        self.started = False

    @property
    def method(self) -> str:
        method: str = self._scope["method"]
        return method

    @property
    def path(self) -> str:
        path: str = self._scope["path"]
        return path

    @property
    def target(self) -> bytes:
        """Path and query, as the agent wrote them."""
        raw: bytes = self._scope.get("raw_path") or self._scope["path"].encode()
        query: bytes = self._scope.get("query_string", b"")
        return raw + b"?" + query if query else raw

    @property
    def headers(self) -> Headers:
        return list(self._scope["headers"])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The request's body as it comes; raises ``AgentGone`` where it stops short."""
        while not self._whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise AgentGone
            self._whole = not message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece

    async def body(self, bytes_max: int) -> bytes:
        """The whole body.

        Raises:
            TooLarge: more than ``bytes_max``.
        """
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > bytes_max:
                raise TooLarge(
                    InvalidInput(f"request body: more than {bytes_max} bytes", bytes_max=bytes_max)
                )
        return bytes(body)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The work's result; it is cancelled once the agent closes its connection.

        To be called when the body was read.

        Raises:
            AgentGone: it did.
        """
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise AgentGone
            return task.result()
        finally:
            for one in (task, watch):
                one.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the answer's head."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer; its length is set here."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, status: int, error: ArrowTQError, *headers: tuple[bytes, bytes]) -> None:
        """An answer that tells an error."""
        more = [RETRY_AFTER] if status == 503 else []
        await self.answer(status, [JSON_TYPE, *headers, *more], error_body(error))

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
