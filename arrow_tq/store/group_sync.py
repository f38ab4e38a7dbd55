"""fdatasync, shared: many writers that need their bytes on disk wait for one round."""

from __future__ import annotations

import threading

from arrow_tq.store.extent import Extent
from arrow_tq_schemas.errors import InternalError


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
        self._failure: str | None = None

    def mark(self, extent: Extent) -> None:
        """The extent has bytes that are not on disk."""
        with self._turn:
            self._dirty.add(extent)

    def sync(self) -> None:
        """Return when everything marked before is on disk.

        Raises:
            InternalError: the device failed, now or before. The kernel drops what it could not write and
                reports it once, so no later round can vouch for those bytes: only a restart finds out.
        """
        with self._turn:
            target = self._begun + 1
        while True:
            with self._turn:
                while self._running and self._done < target and self._failure is None:
                    self._turn.wait()
                if self._failure is not None:
                    raise InternalError(self._failure)
                if self._done >= target:
                    return
                self._running = True
                self._begun += 1
                number, dirty = self._begun, self._dirty
                self._dirty = set()
            self._round(number, dirty)

    def _round(self, number: int, dirty: set[Extent]) -> None:
        done, failure = False, None
        try:
            for extent in dirty:
                if not extent.sealed:
                    extent.file.sync()
            done = True
        except OSError as error:
            failure = (
                f"fdatasync of {extent.file.path}: {error.strerror}; restart the store to see what is kept"
            )
        finally:
            with self._turn:
                self._running = False
                self._failure = self._failure or failure
                if done:
                    self._done = number
                elif failure is None:
                    self._dirty |= dirty
                self._turn.notify_all()
        if failure is not None:
            raise InternalError(failure)
