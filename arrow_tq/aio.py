"""How the awaitable twins run: each call on a thread of the store's own bounded pool."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")

THREADS_MAX = 64


class Threads:
    """A lazily made pool of threads. The default executor is not used: a claim may wait for minutes."""

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self._threads_max = threads_max
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    async def call(self, function: Callable[Args, Result], *args: Args.args, **named: Args.kwargs) -> Result:
        """Await ``function(*args, **named)`` run on a thread, with the caller's context variables."""
        context = contextvars.copy_context()
        work = functools.partial(context.run, functools.partial(function, *args, **named))
        return await asyncio.get_running_loop().run_in_executor(self._ready(), work)

    def close(self) -> None:
        """End the idle threads; running calls finish on their own."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=False)

    def _ready(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(self._threads_max, thread_name_prefix="arrow-tq-aio")
                self._pid = os.getpid()
            return self._pool
