"""Callers that wait until something can be claimed."""

from __future__ import annotations

import threading
import time

from arrow_tq_schemas.errors import Unavailable


class Waiters:
    """A condition with a turn number, so that nothing that happens between two looks is missed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._waiting = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def turn(self) -> int:
        """To be read before looking, and handed to ``wait``."""
        return self._turn

    def wait(self, turn: int, until_s: float) -> bool:
        """Wait until woken since ``turn``; False once ``until_s`` (monotonic) is past.

        Raises:
            Unavailable: the catalog was closed meanwhile.
        """
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(
                    lambda: self._turn != turn or self._closed, max(0.0, until_s - time.monotonic())
                )
            finally:
                self._waiting -= 1
            if self._closed:
                raise Unavailable("the catalog was closed while a claim waited")
            return self._turn != turn

    def wake(self) -> None:
        with self._condition:
            self._turn += 1
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
