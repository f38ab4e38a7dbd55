"""fdatasync, shared: many writers that need their bytes on disk wait for one round."""

from __future__ import annotations

import threading

from arrow_tq.store.extent import Extent


class GroupSync:
    """Rounds of fdatasync over the extents that were appended to. Thread-safe.

    A caller waits for a round that began after its call: it covers all that the caller wrote before.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._dirty: set[Extent] = set()
        self._running = False
        self._begun = 0
        self._done = 0

    def mark(self, extent: Extent) -> None:
        """The extent has bytes that are not on disk."""
        with self._turn:
            self._dirty.add(extent)

    def sync(self) -> None:
        """Return when everything marked before is on disk.

        Raises:
            OSError: the device failed; what was not synced stays marked.
        """
        with self._turn:
            target = self._begun + 1
        while True:
            with self._turn:
                while self._running and self._done < target:
                    self._turn.wait()
                if self._done >= target:
                    return
                self._running = True
                self._begun += 1
                number, dirty = self._begun, self._dirty
                self._dirty = set()
            self._round(number, dirty)

    def _round(self, number: int, dirty: set[Extent]) -> None:
        failed = True
        try:
            for extent in dirty:
                if not extent.sealed:
                    extent.file.sync()
            failed = False
        finally:
            with self._turn:
                self._running = False
                if failed:
                    self._dirty |= dirty
                else:
                    self._done = number
                self._turn.notify_all()
