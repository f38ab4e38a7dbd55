"""What a shard holds: chunks by id, which of them are attached, and extents that hold none any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from arrow_tq.logs import logger
from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.mapped_file import MappedFile
from arrow_tq_schemas.errors import Conflict
from arrow_tq_schemas.ids import ChunkId


class ChunkIndex:
    """Chunks of one shard by id. Thread-safe; a look-up takes no lock.

    Attributes:
        entries: each chunk's place by its id, to be read; changed here alone.
        extents: those that are there.
        corrupt: chunks found damaged.
    """

    def __init__(self) -> None:
        self.entries: dict[ChunkId, Entry] = {}
        self.extents: set[Extent] = set()
        self.corrupt = 0
        self._lock = threading.Lock()
        """Guards the entries' pins, the unpinned and the extents' counts."""
        self._unpinned: dict[ChunkId, float] = {}
        self._retired: list[Extent] = []
        """Without chunks: to be unlinked."""
        self.when_retired: Callable[[Extent], None] = lambda extent: None
        """Called, under the lock, for each extent that has no chunks any more; must not block."""
        self._log = logger("arrow_tq.shard")

    def is_here(self, chunk_id: ChunkId, run: str, checksum: str) -> bool:
        """Whether the same chunk is stored; raises ``Conflict`` where another one has its id."""
        entry = self.entries.get(chunk_id)
        if entry is not None and entry.extent.key.run != run:
            # What another run has stored is not told.
            raise Conflict(f"chunk {chunk_id.hex}: this id cannot be used", id=chunk_id.hex)
        if entry is None or entry.corrupt:
            # A damaged chunk that comes again is stored again.
            return False
        if entry.checksum != checksum:
            raise Conflict(
                f"chunk {chunk_id.hex} is stored with checksum {entry.checksum}, the new one has {checksum}",
                id=chunk_id.hex,
            )
        return True

    def holds(self, chunk_id: ChunkId) -> bool:
        """Whether the chunk is here and not known to be damaged."""
        entry = self.entries.get(chunk_id)
        return entry is not None and not entry.corrupt

    def ids(self) -> list[ChunkId]:
        with self._lock:
            return list(self.entries)

    # -- coming in -----------------------------------------------------------------------------

    def publish(self, chunk_id: ChunkId, entry: Entry) -> None:
        """Show a chunk whose bytes are complete."""
        self.publish_all([(chunk_id, entry)])

    def publish_all(self, located: Iterable[tuple[ChunkId, Entry]]) -> None:
        """Show chunks whose bytes are complete."""
        now = time.monotonic()
        with self._lock:
            for chunk_id, entry in located:
                damaged = self.entries.get(chunk_id)
                if damaged is not None:
                    self._forget(chunk_id)
                    entry.pinned = damaged.pinned
                self.entries[chunk_id] = entry
                entry.extent.chunks += 1
                if not entry.pinned:
                    self._unpinned[chunk_id] = now

    def recovered(self, extent: Extent, located: Iterable[tuple[ChunkId, Entry]]) -> None:
        """Show what an earlier process left; of two copies of a chunk the first one is kept."""
        now = time.monotonic()
        with self._lock:
            self.extents.add(extent)
            for chunk_id, entry in located:
                if chunk_id in self.entries:
                    extent.chunks -= 1
                    continue
                self.entries[chunk_id] = entry
                self._unpinned[chunk_id] = now

    # -- attaching and letting go --------------------------------------------------------------

    def pin(self, ids: Sequence[ChunkId]) -> list[ChunkId]:
        """Mark chunks as attached to a step. Gives the ids that are missing; pins none if any is."""
        with self._lock:
            missing = [one for one in ids if (entry := self.entries.get(one)) is None or entry.corrupt]
            if not missing:
                for chunk_id in ids:
                    self.entries[chunk_id].pinned = True
                    self._unpinned.pop(chunk_id, None)
            return missing

    def unpin(self, ids: Iterable[ChunkId]) -> None:
        """Their step did not commit after all."""
        now = time.monotonic()
        with self._lock:
            for chunk_id in ids:
                entry = self.entries.get(chunk_id)
                if entry is not None:
                    entry.pinned = False
                    self._unpinned[chunk_id] = now

    def is_pinned(self, chunk_id: ChunkId) -> bool:
        entry = self.entries.get(chunk_id)
        return entry is not None and entry.pinned

    def drop(self, ids: Iterable[ChunkId]) -> None:
        """Forget released chunks. Views that were given out stay valid."""
        with self._lock:
            for chunk_id in ids:
                self._forget(chunk_id)

    def drop_unpinned(self, ids: Iterable[ChunkId]) -> int:
        """Forget those that no step attached; gives how many that were."""
        with self._lock:
            free = [chunk_id for chunk_id in ids if chunk_id in self._unpinned]
            for chunk_id in free:
                self._forget(chunk_id)
            return len(free)

    def keep_unpinned(self, ids: Iterable[ChunkId]) -> int:
        """As if those that no step attached were put just now; gives how many that were."""
        now = time.monotonic()
        with self._lock:
            kept = [chunk_id for chunk_id in ids if chunk_id in self._unpinned]
            self._unpinned.update(dict.fromkeys(kept, now))
            return len(kept)

    def drop_orphans(self, ids: Iterable[ChunkId], older_than_s: float) -> int:
        """Forget those that are orphans still, and were not kept meanwhile; gives how many that were."""
        before = time.monotonic() - older_than_s
        with self._lock:
            gone = [one for one in ids if self._unpinned.get(one, before) < before]
            for chunk_id in gone:
                self._forget(chunk_id)
            return len(gone)

    def orphans(self, older_than_s: float) -> list[ChunkId]:
        """Chunks that were put longer ago than that and are attached to nothing."""
        before = time.monotonic() - older_than_s
        with self._lock:
            return [chunk_id for chunk_id, put_at in self._unpinned.items() if put_at < before]

    def damaged(self, chunk_id: ChunkId, entry: Entry) -> None:
        """The chunk's bytes are not what was stored: it is lost from now on, unless it was dropped."""
        with self._lock:
            if entry.extent.retired:
                return
            self.corrupt += not entry.corrupt
            entry.corrupt = True
        self._log.error("chunk is damaged", chunk=chunk_id.hex, path=str(entry.extent.file.path))

    # -- extents -------------------------------------------------------------------------------

    def added(self, extent: Extent) -> None:
        """There is one more extent."""
        with self._lock:
            self.extents.add(extent)

    def removed(self, extent: Extent) -> None:
        """There is one less, which never held anything."""
        with self._lock:
            self.extents.discard(extent)

    def finished(self, extent: Extent) -> None:
        """No chunk is added to it any more."""
        with self._lock:
            self._retire_if_empty(extent)

    def kept(self, extent: Extent) -> list[tuple[ChunkId, Entry]]:
        """What a live extent holds that is not dropped."""
        with self._lock:
            found = [(chunk_id, self.entries.get(chunk_id)) for chunk_id in extent.written]
        return [(one, entry) for one, entry in found if entry is not None and entry.extent is extent]

    def list_extents(self) -> list[Extent]:
        """Those that are there now."""
        with self._lock:
            return list(self.extents)

    def take_retired(self, files: type[MappedFile] = MappedFile) -> list[Extent]:
        """Extents without chunks in files of that type, which belong to the caller from now on."""
        with self._lock:
            retired = [extent for extent in self._retired if isinstance(extent.file, files)]
            self._retired = [extent for extent in self._retired if not isinstance(extent.file, files)]
            self.extents.difference_update(retired)
        return retired

    def clear(self) -> None:
        """Forget everything; of a shard that was closed."""
        self.entries.clear()
        self.extents.clear()

    def _forget(self, chunk_id: ChunkId) -> None:
        """Take a chunk out; the lock is held."""
        entry = self.entries.pop(chunk_id, None)
        self._unpinned.pop(chunk_id, None)
        if entry is None:
            return
        entry.extent.chunks -= 1
        self._retire_if_empty(entry.extent)

    def _retire_if_empty(self, extent: Extent) -> None:
        """Queue it once, whoever of its writer and its droppers is last; the lock is held."""
        if extent.chunks == 0 and extent.sealed and not extent.retired:
            extent.retired = True
            self._retired.append(extent)
            self.when_retired(extent)
