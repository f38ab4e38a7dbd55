"""Callers that wait until something can be claimed."""

from __future__ import annotations

import threading
import time

from arrow_tq_schemas.errors import Unavailable

LOOKING_SHARE = 0.2
PAUSE_S_MIN, PAUSE_S_MAX = 0.002, 1.0
"""Between two looks of one waiter."""


class Waiters:
    """A condition with a turn number, so that nothing that happens between two looks is missed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._waiting = 0
        self._closed = threading.Event()

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def turn(self) -> int:
        """To be read before looking, and handed to ``wait``."""
        return self._turn

    def wait(self, turn: int, until_s: float, look_s: float) -> bool:
        """Wait until woken since ``turn``; False once ``until_s`` (monotonic) is past.

        A waiter that is woken at once, again and again, is held back in proportion to what its look cost
        (``look_s``): all waiters together look for at most ``LOOKING_SHARE`` of the time.

        Raises:
            Unavailable: the catalog was closed meanwhile.
        """
        looked_at_s = time.monotonic()
        with self._condition:
            self._waiting += 1
        try:
            with self._condition:
                left_s = max(0.0, until_s - time.monotonic())
                self._condition.wait_for(lambda: self._turn != turn or self._closed.is_set(), left_s)
                woken = self._turn != turn
                pause_s = min(max(PAUSE_S_MIN, look_s * self._waiting / LOOKING_SHARE), PAUSE_S_MAX)
            if woken:
                # Not on the condition: each commit would wake those that pause.
                self._closed.wait(max(0.0, min(looked_at_s + pause_s, until_s) - time.monotonic()))
        finally:
            with self._condition:
                self._waiting -= 1
        if self._closed.is_set():
            raise Unavailable("the catalog was closed while a claim waited")
        return woken

    def wake(self) -> None:
        with self._condition:
            self._turn += 1
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed.set()
            self._condition.notify_all()
