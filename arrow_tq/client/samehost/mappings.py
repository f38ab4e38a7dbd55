"""Extents of the server that this process maps, and locks for as long as anybody views them."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field as slot
from pathlib import Path

from arrow_tq.client.samehost.locking import Memory, lock_shared, viewed
from arrow_tq.layout.columns import Mask
from arrow_tq_schemas.commands import ExtentPlace
from arrow_tq_schemas.ids import ChunkId

PERIOD_S = 1.0
"""How often mappings are looked through: what the server released is let go within this time."""
UNLOCKED_BYTES = 256 << 20
"""Mapped at most without a lock while nobody views it. The server need not wait for us to use such a file
again; one that it deletes is memory that it counts no more, until we look through. The rest stays locked."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A chunk whose checksum was compared: where its values lie in the extent."""

    offset: int
    rows: int
    valid: Mask | None


@dataclass(slots=True, eq=False)
class Mapping:
    """One extent, locked while anybody views it: ``memory`` gives what is viewed.

    Without a view the server may give the file to another extent, and the mapping is of no use any more.
    """

    path: Path
    inode: tuple[int, int]
    size_bytes: int
    used_at: float
    chunks: dict[ChunkId, Seen] = slot(default_factory=dict)
    """Those that were verified."""
    _mapping: mmap.mmap = slot(kw_only=True)
    _memory: Callable[[], Memory | None] = slot(default=lambda: None)

    @classmethod
    def open(cls, path: Path) -> tuple[Mapping, Memory] | None:
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
            status = os.fstat(descriptor)
            if not status.st_size:
                return None
            # It keeps a duplicate of the descriptor: one that is never locked.
            mapping = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
        inode = (status.st_dev, status.st_ino)
        found = cls(path, inode, status.st_size, time.monotonic(), _mapping=mapping)
        memory = found.memory()
        return None if memory is None else (found, memory)

    def memory(self) -> Memory | None:
        """All of it, locked until the last view of it is gone; None where the server has it no more."""
        memory = self._memory()
        if memory is not None:
            return memory
        try:
            lock = lock_shared(self.path)
        except OSError:
            return None
        status = os.fstat(lock)
        if self.inode != (status.st_dev, status.st_ino) or not self.is_named():
            os.close(lock)
            return None
        memory = viewed(self._mapping, lock, self.size_bytes)
        self._memory = weakref.ref(memory)
        return memory

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
        self._held: dict[str, Memory] = {}
        """Of those that stay locked, viewed or not."""
        self._running = False

    def __len__(self) -> int:
        return len(self._by_token)

    def get(self, place: ExtentPlace) -> tuple[Mapping, Memory] | None:
        """The extent, mapped now where it was not, and its bytes; None where it cannot be."""
        found = self._by_token.get(place.token)
        if found is not None:
            memory = found.memory()
            if memory is None:
                self.drop([place.token])
                return None
        else:
            opened = Mapping.open(Path(place.path))
            if opened is None:
                return None
            found, memory = opened
            with self._changed:
                self._add(place.token, found, memory)
                self._start()
        found.used_at = time.monotonic()
        return found, memory

    def drop(self, tokens: Iterable[str]) -> None:
        """Let go of these: the next ``get`` maps them anew."""
        for token in tokens:
            self._by_token.pop(token, None)
            self._held.pop(token, None)

    def close(self) -> None:
        """Let go of all; views that were given out keep theirs."""
        with self._changed:
            self._by_token.clear()
            self._held.clear()
            self._changed.notify_all()

    def _add(self, token: str, mapping: Mapping, memory: Memory) -> None:
        """Keep it, down to the bound; the lock is held."""
        free = sum(one.size_bytes for other, one in self._by_token.items() if other not in self._held)
        self._by_token[token] = mapping
        if free + mapping.size_bytes > UNLOCKED_BYTES:
            self._held[token] = memory
        while len(self._by_token) > self._extents_max:
            self.drop([min(self._by_token, key=lambda token: self._by_token[token].used_at)])

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
                self.drop([token])


def reader_of(memory: Memory) -> Callable[[int, int], memoryview]:
    """How ``ColumnLayout.read`` looks at a mapping."""
    return lambda first, size: memory[first : first + size].data
