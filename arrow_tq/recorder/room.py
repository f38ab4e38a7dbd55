"""How many payload bytes may be on their way at once, and how long callers stood waiting for that."""

from __future__ import annotations

import threading
import time

from arrow_tq_schemas.errors import DeadlineExceeded

COST_BYTES_MIN = 64 << 10
"""A smaller chunk counts as this much, so that a bound on bytes is one on chunks too."""


class Room:
    """Bytes in flight, bounded. Thread-safe."""

    def __init__(self, bytes_max: int, wait_s: float) -> None:
        self.bytes_max = bytes_max
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._used = 0
        self._in_flight = 0
        self.waits = 0
        self.waited_s = 0.0

    @property
    def in_flight_bytes(self) -> int:
        return self._in_flight

    def take(self, size: int) -> None:
        """Wait for room; what is larger than all of it goes alone.

        Raises:
            DeadlineExceeded: none became free in time; names the bound.
        """
        with self._changed:
            if not self._fits(size):
                began = time.monotonic()
                self.waits += 1
                fits = self._changed.wait_for(lambda: self._fits(size), self._wait_s)
                self.waited_s += time.monotonic() - began
                if not fits:
                    raise DeadlineExceeded(
                        f"{size} bytes to write: {self._in_flight} bytes of inflight_bytes_max="
                        f"{self.bytes_max} were in flight for {self._wait_s:g} s"
                    )
            self._used += max(size, COST_BYTES_MIN)
            self._in_flight += size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= max(size, COST_BYTES_MIN)
            self._in_flight -= size
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + max(size, COST_BYTES_MIN) <= self.bytes_max
