"""What all of a proxy's requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from arrow_tq.adapters import Policy, RowRule
from arrow_tq.proxy.budget import Budget
from arrow_tq.proxy.config import ProxyConfig
from arrow_tq.proxy.forward import Engine
from arrow_tq.proxy.metrics import Metrics
from arrow_tq.proxy.protocols import protocols
from arrow_tq.proxy.protocols.base import Protocol
from arrow_tq.proxy.replies import Replies
from arrow_tq.proxy.sessions import Sessions
from arrow_tq.proxy.store_link import StoreLink

Result = TypeVar("Result")


THREAD_BYTES = 64 << 10
"""Texts from this size on are parsed on a thread."""


class Decoding:
    """Threads that parse and decode answers: a few, since each works on a large one at a time."""

    def __init__(self, decodes_max: int) -> None:
        self._pool = ThreadPoolExecutor(decodes_max, thread_name_prefix="arrow-tq-decode")

    async def run(self, call: Callable[..., Result], *args: object) -> Result:
        """Await the call's result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    async def maybe(self, nbytes: int, call: Callable[[], Result]) -> Result:
        """The call's result; on a thread where it works on that many bytes."""
        return await self.run(call) if nbytes >= THREAD_BYTES else call()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, eq=False)
class Parts:
    """The proxy's parts, made once."""

    config: ProxyConfig
    engine: Engine
    store: StoreLink
    sessions: Sessions
    replies: Replies
    budget: Budget
    decoding: Decoding
    metrics: Metrics
    routes: dict[str, Protocol]
    policy: Policy
    commits: set[asyncio.Task[bytes]] = field(default_factory=set)
    """Commits under way: they are waited for before the store is closed."""
    under_way: int = 0
    draining: bool = False

    @classmethod
    def of(cls, config: ProxyConfig) -> Parts:
        store = StoreLink(config)
        parts = cls(
            config=config,
            engine=Engine(config),
            store=store,
            sessions=Sessions(store, config.sessions_max, config.session_ttl_s),
            replies=Replies(config.replies_bytes_max),
            budget=Budget(config.inflight_bytes_max),
            decoding=Decoding(config.decodes_max),
            metrics=Metrics(),
            routes=protocols(config),
            policy=Policy(rule=RowRule(config.row_rule)),
        )
        parts._watch()
        return parts

    async def close(self) -> None:
        await self.engine.close()
        self.decoding.close()
        await self.store.close()

    def _watch(self) -> None:
        watch = self.metrics.watch
        watch("calls_under_way", "Recorded calls under way", lambda: self.under_way)
        watch("sessions", "Sessions remembered", lambda: len(self.sessions))
        watch("inflight_bytes", "Bytes of answers in memory", lambda: self.budget.used_bytes)
        watch("inflight_waits", "Answers that waited for room", lambda: self.budget.waits)
        watch("replies_bytes", "Bytes of answers kept for repeated calls", lambda: self.replies.nbytes)
        watch("store_connected", "Whether the store was reached", lambda: self.store.connected)
