"""Extents that are done give their memory to the extents that follow.

A fresh page is zeroed by the kernel; a page that a released extent held needs nothing. Only within a run
(no run's bytes ever lie in another's file), only memory, and only once nobody maps the file any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arrow_tq.store.mapped_file import MappedFile, discard


@dataclass(frozen=True, slots=True, eq=False)
class _Spare:
    run: str
    file: MappedFile
    since: float


class Recycling:
    """Files without content, kept for a while. Thread-safe.

    Args:
        folder: where they lie meanwhile; start-up empties it.
        keep_bytes: memory kept at most.
        idle_s: a file that nobody wanted for so long is deleted.
    """

    def __init__(self, folder: Path, keep_bytes: int, idle_s: float) -> None:
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._spares: list[_Spare] = []
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            discard(left)

    @property
    def kept_bytes(self) -> int:
        with self._lock:
            return sum(spare.file.allocated_bytes for spare in self._spares)

    def kept_of(self, *runs: str) -> int:
        """Bytes kept for these runs."""
        with self._lock:
            return sum(spare.file.allocated_bytes for spare in self._spares if spare.run in runs)

    def put_aside(self, file: MappedFile) -> None:
        """Take a file's name away from where extents are, whoever still maps it."""
        with self._lock:
            self._number += 1
            name = self._folder / f"{self._number:06d}"
        file.move(name)

    def offer(self, run: str, file: MappedFile) -> None:
        """A file that nobody maps: keep it, or delete it where enough is kept."""
        with self._lock:
            kept = sum(spare.file.allocated_bytes for spare in self._spares)
            if 0 < file.allocated_bytes <= self._keep_bytes - kept:
                self._spares.append(_Spare(run, file, time.monotonic()))
                return
        file.free()

    def take(self, run: str, path: Path, size_bytes: int) -> MappedFile | None:
        """A file for a new extent of the run, named ``path`` and mapped; None where none is kept."""
        with self._lock:
            own = [spare for spare in self._spares if spare.run == run]
            own = [spare for spare in own if spare.file.allocated_bytes <= size_bytes]
            if not own:
                return None
            # Of those that are large enough, more or less, the one that was in use a moment ago.
            best = max(own, key=lambda spare: (8 * spare.file.allocated_bytes // size_bytes, spare.since))
            self._spares.remove(best)
        best.file.reuse(path, size_bytes)
        return best.file

    def expire(self) -> None:
        """Delete what nobody wanted for a while."""
        before = time.monotonic() - self._idle_s
        self._delete(lambda spare: spare.since < before)

    def clear(self) -> bool:
        """Delete everything that is kept, to make room; whether that was anything."""
        return self._delete(lambda spare: True)

    def _delete(self, chosen: Callable[[_Spare], bool]) -> bool:
        with self._lock:
            gone = [spare for spare in self._spares if chosen(spare)]
            self._spares = [spare for spare in self._spares if spare not in gone]
        for spare in gone:
            spare.file.free()
        return bool(gone)
