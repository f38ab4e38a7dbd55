"""Allocates and faults in memory ahead of the writers, on one background thread.

Fresh tmpfs pages are zeroed by the kernel: 190 ms per 256 MiB were measured. Off the writers' path that
costs them nothing.
"""

from __future__ import annotations

import queue
import threading

from arrow_tq.logs import logger
from arrow_tq.store.extent import Extent
from arrow_tq_schemas.errors import StoreFull

QUEUE_MAX = 256
STOP_S = 10.0


class Populator:
    """Grows extents to twice what is used, ``ahead_bytes`` at most, so small ones stay small."""

    def __init__(self, grow_bytes: int, ahead_bytes: int) -> None:
        self._grow_bytes = grow_bytes
        self._ahead_bytes = ahead_bytes
        self._queue: queue.Queue[Extent | None] = queue.Queue(QUEUE_MAX)
        self._waiting: set[Extent] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="arrow-tq-populate", daemon=True)
        self._thread.start()

    def look_after(self, extent: Extent) -> None:
        """After an append: ask for memory where the extent runs short. Never blocks.

        A burst should meet little of this work, so it begins late; ``top_up`` does it in quiet moments.
        """
        self._ask(extent, min(extent.used_bytes, self._ahead_bytes) // 4)

    def top_up(self, extent: Extent) -> None:
        """In a quiet moment: have all of the memory ahead ready. Never blocks."""
        self._ask(extent, min(extent.used_bytes, self._ahead_bytes))

    def prepare(self, extent: Extent) -> None:
        """Make a new extent's first ``ahead_bytes`` ready. Never blocks: a busy thread makes less ready."""
        with self._lock:
            if extent in self._waiting or self._queue.full():
                return
            self._waiting.add(extent)
        self._queue.put(extent)

    def _ask(self, extent: Extent, margin: int) -> None:
        if extent.file.allocated_bytes < min(extent.used_bytes + margin, extent.file.size_bytes):
            self.prepare(extent)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(STOP_S)

    def _loop(self) -> None:
        log = logger("arrow_tq.populate")
        while (extent := self._queue.get()) is not None:
            try:
                self._populate(extent)
            except StoreFull:
                # The writer meets the same bound where it needs the room, and says so to its caller.
                log.info("no room ahead", path=str(extent.file.path))
            except (OSError, ValueError):
                log.exception("populate failed", path=str(extent.file.path))
            with self._lock:
                self._waiting.discard(extent)

    def _populate(self, extent: Extent) -> None:
        if extent.sealed:
            return
        ahead = min(extent.used_bytes, self._ahead_bytes) or self._ahead_bytes
        wanted = min(extent.used_bytes + ahead, extent.file.size_bytes)
        extent.file.populate()
        while (allocated := extent.file.allocated_bytes) < wanted and not extent.sealed:
            # In steps: a writer that needs room now waits for one of them at most.
            extent.file.grow(min(allocated + self._grow_bytes, wanted), self._grow_bytes)
            extent.file.populate()
