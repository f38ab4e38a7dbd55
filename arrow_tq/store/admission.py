"""Who may begin: past the soft mark only new sessions are refused, so that open ones can finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from arrow_tq.store.catalog import Catalog
from arrow_tq.store.holding import ChunkHolder
from arrow_tq_schemas.commands import OpenSession
from arrow_tq_schemas.errors import ArrowTQError, StoreFull

ASK_AGAIN_S = 2.0
"""A waiter that has not asked again for so long has gone away; they ask every quarter of a second."""
WAITERS_KEPT_MAX = 65536


class Admission:
    """Admits sessions, and knows which of those refused wait for room. Thread-safe."""

    def __init__(self, shard: ChunkHolder, catalog: Catalog, soft_mark: float) -> None:
        self._shard = shard
        self._catalog = catalog
        self._soft_mark = soft_mark
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], float] = {}
        """By run and session, until when it counts as waiting."""

    @property
    def waiting(self) -> int:
        """Sessions that wait for room now."""
        now = time.monotonic()
        with self._lock:
            self._waiting = {key: until for key, until in self._waiting.items() if until > now}
            return len(self._waiting)

    def admit(self, command: OpenSession) -> None:
        """Raises ``StoreFull`` for a new session of a store past its soft mark."""
        (refusal,) = self.refusals([command])
        if refusal is not None:
            raise refusal

    def refusals(self, commands: Sequence[OpenSession]) -> list[ArrowTQError | None]:
        """Why each session may not be opened now; None: it may. The store is looked at once."""
        full = bool(commands) and self._full()
        return [self._refusal(command, full) for command in commands]

    def _refusal(self, command: OpenSession, full: bool) -> ArrowTQError | None:
        key = (command.run, command.session_id)
        try:
            if not full or self._catalog.session_goes_on(*key):
                with self._lock:
                    self._waiting.pop(key, None)
                return None
        except ArrowTQError as error:
            return error
        if command.wait_s > 0:
            with self._lock:
                if len(self._waiting) < WAITERS_KEPT_MAX:
                    self._waiting[key] = time.monotonic() + min(command.wait_s, ASK_AGAIN_S)
        usage = self._shard.usage()
        return StoreFull(
            f"session {command.session_id!r}: the store is past its soft mark "
            f"({usage.used_bytes} of {usage.capacity_bytes} bytes, mark {self._soft_mark:.0%}); "
            "open sessions go on, new ones wait",
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
        )

    def _full(self) -> bool:
        if not self._is_past_mark():
            return False
        # Extents that hold nothing are kept for a while; now they are in the way.
        return not self._shard.make_room() or self._is_past_mark()

    def _is_past_mark(self) -> bool:
        used, capacity = self._shard.level()
        return used > self._soft_mark * capacity
