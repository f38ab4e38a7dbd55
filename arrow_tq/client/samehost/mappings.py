"""Extents of the server that this process maps, each under a shared lock for as long as anybody views it."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field as slot
from pathlib import Path

from arrow_tq.layout.columns import Mask, Values
from arrow_tq_schemas.commands import ExtentPlace
from arrow_tq_schemas.ids import ChunkId

PERIOD_S = 1.0
"""How often mappings are looked through: what the server released is let go within this time."""


@dataclass(slots=True, eq=False)
class Mapping:
    """One extent.

    Its lock goes when the last view of it does: the mapping holds a duplicate of the descriptor that was
    locked, and every view holds the mapping.
    """

    path: Path
    inode: tuple[int, int]
    view: memoryview
    used_at: float
    chunks: dict[ChunkId, tuple[Values, Mask | None]] = slot(default_factory=dict)
    """Those that were verified."""

    @classmethod
    def open(cls, path: Path) -> Mapping | None:
        """Map the file that has this name while it is locked; None where there is none, or not for us.

        The server renames or unlinks an extent before it tries for the exclusive lock under which its memory
        becomes another's. So a name that still leads to the locked file says that it is the extent of that
        name, and the lock that it will stay so.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status, named = os.fstat(descriptor), path.stat()
            inode = (status.st_dev, status.st_ino)
            if inode != (named.st_dev, named.st_ino) or not status.st_size:
                return None
            mapping = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
        return cls(path, inode, memoryview(mapping), time.monotonic())

    def is_named(self) -> bool:
        """Whether the server still has it."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return self.inode == (status.st_dev, status.st_ino)


class Mappings:
    """A bounded cache of mappings. Thread-safe.

    A thread lets go of what the server released and of what nobody asked for in a while; it runs while
    there are any.

    Args:
        idle_s: a mapping that is not used for so long is let go.
        extents_max: mappings kept at most; each holds a descriptor.
    """

    def __init__(self, idle_s: float, extents_max: int) -> None:
        self._idle_s = idle_s
        self._extents_max = int(extents_max)
        self._changed = threading.Condition()
        self._by_token: dict[str, Mapping] = {}
        self._running = False

    def __len__(self) -> int:
        return len(self._by_token)

    def get(self, place: ExtentPlace) -> Mapping | None:
        """The extent, mapped now where it was not; None where it cannot be."""
        found = self._by_token.get(place.token)
        if found is None:
            found = Mapping.open(Path(place.path))
            if found is None:
                return None
            with self._changed:
                found = self._by_token.setdefault(place.token, found)
                self._shrink()
                self._start()
        found.used_at = time.monotonic()
        return found

    def drop(self, tokens: Iterable[str]) -> None:
        """Let go of these: the next ``get`` maps them anew."""
        for token in tokens:
            self._by_token.pop(token, None)

    def close(self) -> None:
        """Let go of all; views that were given out keep theirs."""
        with self._changed:
            self._by_token.clear()
            self._changed.notify_all()

    def _shrink(self) -> None:
        """Let go of those that were used least recently, down to the bound; the lock is held."""
        while len(self._by_token) > self._extents_max:
            del self._by_token[min(self._by_token, key=lambda token: self._by_token[token].used_at)]

    def _start(self) -> None:
        if not self._running:
            self._running = True
            threading.Thread(target=self._loop, name="arrow-tq-mappings", daemon=True).start()

    def _loop(self) -> None:
        with self._changed:
            while self._by_token:
                self._changed.wait(PERIOD_S)
                self._sweep(list(self._by_token.items()))
            self._running = False

    def _sweep(self, mappings: Iterable[tuple[str, Mapping]]) -> None:
        before = time.monotonic() - self._idle_s
        for token, mapping in mappings:
            if mapping.used_at < before or not mapping.is_named():
                self._by_token.pop(token, None)


def reader_of(view: memoryview) -> Callable[[int, int], memoryview]:
    """How ``ColumnLayout.read`` looks at a mapping."""
    return lambda first, size: view[first : first + size]
