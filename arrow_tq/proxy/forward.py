"""The way to the engine: calls with deadlines, bodies as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from arrow_tq.proxy.budget import Hold
from arrow_tq.proxy.config import ProxyConfig
from arrow_tq.proxy.exchange import Exchange
from arrow_tq.proxy.failures import AgentGone, EngineFailure
from arrow_tq.proxy.headers import Headers, forwarded
from arrow_tq_schemas.errors import DeadlineExceeded, MalformedMessage, Unreachable

KEEPALIVE_S = 2.0
"""Servers of the engines close idle connections after 5 s: one must not be used at that moment."""
TEXT_CHARS_MAX = 200
SMALL_BYTES = 1 << 20
"""Bodies that are handed on as they come are larger than this."""


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """An engine's answer whose body is still to be read."""

    response: httpx.Response

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def headers(self) -> Headers:
        return self.response.headers.raw

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        kind: str = self.response.headers.get("content-type", "")
        return kind.startswith("text/event-stream")

    @property
    def length(self) -> int | None:
        """Bytes of the body, where that is said."""
        told = self.response.headers.get("content-length")
        return int(told) if told is not None and told.isdigit() else None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            EngineFailure: it broke off, or nothing came for ``response_s``.
        """
        with _failures(self.response.request):
            async for piece in self.response.aiter_raw():
                yield piece

    async def body(self, hold: Hold, bytes_max: int) -> bytearray:
        """All of it, read when there is room for it.

        Raises:
            EngineFailure: as ``pieces``; or it is longer than ``bytes_max``.
        """
        body = bytearray()
        length = self.length
        if length is not None:
            if length > bytes_max:
                raise too_long(bytes_max)
            await hold.expect(length)
        async for piece in self.pieces():
            if len(body) + len(piece) > bytes_max:
                raise too_long(bytes_max)
            await hold.cover(len(body) + len(piece))
            body += piece
        hold.grown()
        return body


def too_long(bytes_max: int) -> EngineFailure:
    """The failure of an answer past its bound."""
    error = MalformedMessage(f"the engine's answer: more than {bytes_max} bytes", bytes_max=bytes_max)
    return EngineFailure(502, error)


class Engine:
    """The upstream. One pool of connections; close it."""

    def __init__(self, config: ProxyConfig) -> None:
        self._base = httpx.URL(config.upstream.rstrip("/"))
        limits = httpx.Limits(
            max_connections=config.calls_max, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S
        )
        timeout = httpx.Timeout(config.response_s, connect=config.connect_s, pool=config.connect_s)
        transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    @asynccontextmanager
    async def call(
        self, method: str, target: bytes, headers: Headers, body: bytes | AsyncIterator[bytes]
    ) -> AsyncIterator[Answered]:
        """Send a request; its answer's body is read within the block.

        Raises:
            EngineFailure: no answer.
        """
        url = self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + target)
        request = httpx.Request(method, url, headers=headers, content=body, extensions=self._extensions())
        with _failures(request):
            response = await self._client.send(request, stream=True)
        try:
            yield Answered(response)
        finally:
            await response.aclose()

    async def close(self) -> None:
        await self._client.aclose()

    def _extensions(self) -> dict[str, object]:
        return {"timeout": self._client.timeout.as_dict()}


async def pass_through(
    exchange: Exchange, engine: Engine, body: bytes | None, *more: tuple[bytes, bytes]
) -> int:
    """Hand a request on, and the answer back, as they are; gives the status.

    Args:
        body: the request's, where it was read already.
        more: headers for the answer.

    Raises:
        EngineFailure: before anything was answered. An answer that breaks off is broken off here too.
    """
    headers = forwarded(exchange.headers, b"host")
    named = {name for name, _ in headers}
    content: bytes | AsyncIterator[bytes] = b""
    if body is not None:
        content = body
    elif 0 <= _length(exchange.headers) <= SMALL_BYTES:
        # Read first: then the agent's connection can be watched while the engine works.
        content = body = await exchange.body(SMALL_BYTES)
    elif b"content-length" in named or (b"transfer-encoding" in dict(exchange.headers)):
        content = exchange.pieces()

    async def hand_back() -> int:
        async with engine.call(exchange.method, exchange.target, headers, content) as answered:
            await exchange.start(answered.status, [*forwarded(answered.headers), *more])
            async for piece in answered.pieces():
                await exchange.write(piece)
            await exchange.end()
            return answered.status

    if isinstance(content, bytes):
        if body is None:
            async for _ in exchange.pieces():
                continue
        return await exchange.unless_gone(hand_back())
    return await hand_back()


def _length(headers: Headers) -> int:
    """Bytes of a body, -1 where that is not said."""
    told = dict(headers).get(b"content-length", b"")
    return int(told) if told.isdigit() else -1


class _failures:  # noqa: N801
    """Turns what httpx raises into ours."""

    def __init__(self, request: httpx.Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, httpx.HTTPError | httpx.StreamError | OSError):
            return
        if isinstance(error, AgentGone):
            return
        url = str(self._request.url.copy_with(query=None))
        if isinstance(error, httpx.TimeoutException):
            late = DeadlineExceeded(f"{url}: no answer in time ({type(error).__name__})", url=url)
            raise EngineFailure(504, late) from None
        text = str(error)[:TEXT_CHARS_MAX] or type(error).__name__
        raise EngineFailure(502, Unreachable(f"{url}: {text}", url=url)) from None
