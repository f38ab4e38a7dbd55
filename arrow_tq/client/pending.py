"""A put under way: who waits for it, and how much room all puts together take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arrow_tq.backend import PutHandle
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.errors import ArrowTQError, DeadlineExceeded, from_wire
from arrow_tq_schemas.fields import Field


class PendingPut:
    """Implements ``PutHandle`` for chunks that travel.

    Args:
        hurry: called where somebody begins to wait: chunks that wait for company leave at once then.
    """

    def __init__(self, chunks: int, hurry: Callable[[], None]) -> None:
        # Conditions are made by those who wait: most puts are settled before anybody does.
        self._lock = threading.Lock()
        self._changed: threading.Condition | None = None
        self._left = chunks
        self._hurry = hurry
        self._error: ArrowTQError | None = None

    @property
    def settled(self) -> bool:
        """Whether every chunk is stored or failed: ``wait`` has nothing to wait for."""
        return not self._left

    def settle(self, error: ArrowTQError | None) -> None:
        """One chunk is stored, or failed."""
        with self._lock:
            if self._error is None:
                self._error = error
            # Last: who sees that none is left also sees the error.
            self._left -= 1
            if not self._left and self._changed is not None:
                self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every chunk is stored; raise the first error once all are settled."""
        if not self._left and self._error is None:
            return
        self._hurry()
        with self._lock:
            self._changed = self._changed or threading.Condition(self._lock)
            if not self._changed.wait_for(lambda: self._left == 0, timeout_s):
                raise DeadlineExceeded(f"put: {self._left} chunks were not stored within {timeout_s:g} s")
            if self._error is not None:
                # A copy: one exception object raised by several waiters would grow a traceback of all.
                raise from_wire(self._error.to_wire())


class JoinedPuts:
    """Implements ``PutHandle`` for chunks that were put in several places."""

    def __init__(self, handles: Sequence[PutHandle]) -> None:
        self.handles = handles

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every chunk is stored; raise the first error."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for handle in self.handles:
            handle.wait(None if until is None else max(until - time.monotonic(), 0.0))


@dataclass(slots=True, eq=False)
class Item:
    """One chunk on its way."""

    field: Field
    chunk: Chunk
    handle: PendingPut
    resent: bool = False

    @property
    def nbytes(self) -> int:
        return self.chunk.nbytes


@dataclass(slots=True)
class Company:
    """Small chunks wait a moment for others, since a message or a call costs more than they do.

    Not thread-safe: under its owner's lock.

    Args:
        chunks_min, bytes_min: so many have gathered: they leave.
        linger_s: the first one never waits longer.
    """

    chunks_min: int
    bytes_min: int
    linger_s: float
    chunks: int = 0
    nbytes: int = 0
    since: float = 0.0
    hurried: bool = False

    def add(self, nbytes: int) -> bool:
        """One more; whether whoever takes them has to be woken."""
        if not self.chunks:
            self.since = time.monotonic()
        self.chunks += 1
        self.nbytes += nbytes
        return self.chunks == 1 or self.is_enough

    def take(self, nbytes: int) -> None:
        """One left."""
        self.chunks -= 1
        self.nbytes -= nbytes
        if not self.chunks:
            self.hurried = False

    def hurry(self) -> bool:
        """Somebody waits for them; whether there are any."""
        self.hurried = self.chunks > 0
        return self.hurried

    @property
    def is_enough(self) -> bool:
        return self.hurried or self.chunks >= self.chunks_min or self.nbytes >= self.bytes_min

    @property
    def wait_s(self) -> float:
        """How much longer they may wait for others."""
        return 0.0 if self.is_enough else max(self.since + self.linger_s - time.monotonic(), 0.0)


class Room:
    """Payload bytes that may be in flight at once."""

    def __init__(self, bytes_max: int, wait_s: float) -> None:
        # Most puts find room: they and those that give it back take the lock alone, and tell nobody.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._bytes_max = bytes_max
        self._wait_s = wait_s
        self._used = 0
        self.waits = 0
        self.waited_s = 0.0

    def take(self, size: int) -> None:
        """Wait for room; a chunk larger than all of it goes alone.

        Raises:
            DeadlineExceeded: no room became free in ``put_room_s``.
        """
        with self._lock:
            if not self._fits(size):
                self._wait(size)
            self._used += size

    def give(self, size: int) -> None:
        with self._lock:
            self._used -= size
            if self._waiting:
                self._changed.notify_all()

    @property
    def used_bytes(self) -> int:
        return self._used

    def _wait(self, size: int) -> None:
        """Under the lock."""
        self.waits += 1
        self._waiting += 1
        began = time.monotonic()
        try:
            fits = self._changed.wait_for(lambda: self._fits(size), self._wait_s)
        finally:
            self._waiting -= 1
            self.waited_s += time.monotonic() - began
        if not fits:
            raise DeadlineExceeded(
                f"put of {size} bytes: {self._used} bytes of put_inflight_bytes_max={self._bytes_max} "
                f"were in flight for {self._wait_s:g} s"
            )

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size <= self._bytes_max
