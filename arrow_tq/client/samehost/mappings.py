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
"""How often mappings are looked through."""
KEEP_S = 8.0
"""How long the mapping of a released extent is kept after its last use: its file may come back as another."""
Inode = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """A chunk whose checksum was compared: where its values lie in the extent."""

    offset: int
    rows: int
    valid: Mask | None


@dataclass(slots=True, eq=False)
class Mapping:
    """One extent, locked while anybody views it: ``memory`` gives what is viewed.

    Without a view the server may give the file to another extent, which then has the mapping, or free its
    memory, mapped or not.
    """

    path: Path
    inode: Inode
    size_bytes: int
    used_at: float
    chunks: dict[ChunkId, Seen] = slot(default_factory=dict)
    """Those that were verified."""
    _mapping: mmap.mmap = slot(kw_only=True)
    _memory: Callable[[], Memory | None] = slot(default=lambda: None)

    @classmethod
    def open(
        cls, path: Path, known: Callable[[Inode], Mapping | None] = lambda inode: None
    ) -> tuple[Mapping, Memory] | None:
        """Map the file that has this name while it is locked; None where there is none, or not for us.

        Args:
            known: gives what was mapped of the same file when it was another extent: its pages are there.

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
            inode = (status.st_dev, status.st_ino)
            before = known(inode)
            if before is not None and before.size_bytes == status.st_size:
                mapping = before._mapping
            else:
                # It keeps a duplicate of the descriptor: one that is never locked.
                mapping = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
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
    """A bounded cache of mappings, without a lock where nobody views them. Thread-safe.

    The server uses and frees such files as if nobody had mapped them. A thread lets go of what nobody asked
    for in a while, and earlier of what was released; it runs while there are any.

    Args:
        idle_s: a mapping that is not used for so long is let go.
        extents_max: mappings kept at most; each holds a descriptor.
    """

    def __init__(self, idle_s: float, extents_max: int) -> None:
        self._idle_s = idle_s
        self._extents_max = int(extents_max)
        self._changed = threading.Condition()
        self._by_token: dict[str, Mapping] = {}
        self._tokens: dict[Inode, str] = {}
        """Of the latest extent in each file."""
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
            opened = Mapping.open(Path(place.path), self._known)
            if opened is None:
                return None
            found, memory = opened
            with self._changed:
                self._add(place.token, found)
                self._start()
        found.used_at = time.monotonic()
        return found, memory

    def drop(self, tokens: Iterable[str]) -> None:
        """Let go of these: the next ``get`` maps them anew."""
        for token in tokens:
            mapping = self._by_token.pop(token, None)
            if mapping is not None and self._tokens.get(mapping.inode) == token:
                del self._tokens[mapping.inode]

    def close(self) -> None:
        """Let go of all; views that were given out keep theirs."""
        with self._changed:
            self._by_token.clear()
            self._tokens.clear()
            self._changed.notify_all()

    def _known(self, inode: Inode) -> Mapping | None:
        """What is mapped of this file."""
        token = self._tokens.get(inode)
        return None if token is None else self._by_token.get(token)

    def _add(self, token: str, mapping: Mapping) -> None:
        """Keep it, down to the bound, instead of what its file was before; the lock is held."""
        before = self._tokens.get(mapping.inode)
        if before is not None and before != token:
            self.drop([before])
        self._by_token[token] = mapping
        self._tokens[mapping.inode] = token
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
        now = time.monotonic()
        for token, mapping in mappings:
            idle_s = now - mapping.used_at
            if idle_s > self._idle_s or (idle_s > KEEP_S and not mapping.is_named()):
                self.drop([token])


def reader_of(memory: Memory) -> Callable[[int, int], memoryview]:
    """How ``ColumnLayout.read`` looks at a mapping."""
    return lambda first, size: memory[first : first + size].data
