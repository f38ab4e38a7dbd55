"""How many calls of each kind may run at once. Flight itself would start a thread for every one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from arrow_tq_schemas.errors import Busy, Unavailable
from arrow_tq_server.config import ServerConfig
from arrow_tq_server.metrics import Metrics


class Budget:
    """Places for one kind of call; ``place()`` waits a bounded time for one."""

    def __init__(self, setting: str, places: int, wait_s: float, metrics: Metrics) -> None:
        self._setting = setting
        self._places = places
        self._wait_s = wait_s
        self._free = threading.BoundedSemaphore(places)
        self._busy = metrics.busy.labels(setting)
        self._waits = metrics.waits.labels(setting)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place; raises ``Busy`` naming the setting when none becomes free in time."""
        if not self._free.acquire(blocking=False):
            self._waits.inc()
            if not self._free.acquire(timeout=self._wait_s):
                raise Busy(
                    f"{self._setting}: all {self._places} places were taken for {self._wait_s} s",
                    setting=self._setting,
                    limit=self._places,
                )
        self._busy.inc()
        try:
            yield
        finally:
            self._busy.dec()
            self._free.release()


class Budgets:
    """Separate by kind, so that idle put streams or waiting claims never keep an action out."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        def budget(setting: str, places: int) -> Budget:
            return Budget(setting, places, config.handler_wait_s, metrics)

        self.put_streams = budget("put_streams_max", config.put_streams_max)
        self.gets = budget("gets_max", config.gets_max)
        self.actions = budget("actions_max", config.actions_max)
        self.waiting_claims = budget("waiting_claims_max", config.waiting_claims_max)


class Activity:
    """Work under way, so that a stop can wait for it, and for nothing that is merely connected."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A call that may take long and loses nothing when it is cut off: a stop does not wait for it."""
        with self._changed:
            self._admit()
        yield

    @contextmanager
    def work(self) -> Iterator[None]:
        """One unit of work; raises ``Unavailable`` once the server stops."""
        with self._changed:
            self._admit()
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _admit(self) -> None:
        if self._draining:
            raise Unavailable("the server is stopping")

    def drain(self, timeout_s: float) -> int:
        """Admit no more work and wait for what runs; returns how much still does at the deadline."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: self._running == 0, timeout_s)
            return self._running
