"""A shard: write-once chunks in extents, found by id. It knows no sessions and no segments."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field as slot
from typing import Literal

from arrow_tq.logs import logger
from arrow_tq.store import sidecar
from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.extent_key import ExtentKey, Roots, Tier, sync_folders
from arrow_tq.store.group_sync import GroupSync
from arrow_tq.store.populate import Populator
from arrow_tq.store.recovery import Recovery, RecoveryReport
from arrow_tq.store.recycling import Recycling
from arrow_tq.store.retention import Retention
from arrow_tq.store.shard_config import ShardConfig, ShardUsage
from arrow_tq.store.space import Space
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, verify
from arrow_tq_schemas.errors import Conflict, StoreFull, StoreInUse
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId

Durability = Literal["process", "disk"]


@dataclass(slots=True, eq=False)
class _Stream:
    """Where chunks of one key are appended: one live extent, one writer at a time."""

    lock: threading.Lock = slot(default_factory=threading.Lock)
    live: Extent | None = None
    spare: Extent | None = None
    """Made ready in the background when the live one is nearly full."""
    next_number: int = 0


class Shard:
    """Keeps chunks. Thread-safe; readers never wait for writers.

    Opening recovers what an earlier process left; ``recovery`` says what that was.
    """

    def __init__(self, config: ShardConfig) -> None:
        self.config = config
        self._pid = os.getpid()
        self._roots = Roots(config.data_dir, config.memory_dir)
        self._space = Space(config.capacity_bytes)
        self._sync = GroupSync()
        self._lock = threading.Lock()
        """Guards the index's pins, the unpinned and the extents' counts."""
        self._index: dict[ChunkId, Entry] = {}
        self._unpinned: dict[ChunkId, float] = {}
        self._streams: dict[ExtentKey, _Stream] = {}
        self._extents: set[Extent] = set()
        self._retired: list[Extent] = []
        """Without chunks: to be unlinked by upkeep."""
        self._recycling = Recycling(
            config.memory_dir / "recycled", config.recycle_bytes, config.recycle_idle_s
        )
        self._retention = Retention(self._roots, self._recycling)
        self._corrupt = 0
        self._log = logger("arrow_tq.shard")
        self.recovery = self._recover()
        self._populator = Populator(config.grow_bytes, config.ahead_bytes)

    # -- writing -------------------------------------------------------------------------------

    def put(self, field: Field, chunk: Chunk, durability: Durability) -> bool:
        """Store a chunk. True: it is new; False: the same chunk was here already.

        Raises:
            Conflict: another chunk of that id is here; names both checksums.
            StoreFull: no room; nothing was written.
        """
        self._check_process()
        chunk_id = chunk.header.chunk_id
        tier: Tier = "disk" if durability == "disk" else "memory"
        key = ExtentKey(chunk.header.run, chunk.header.field, chunk_id.group, tier)
        stream = self._streams.get(key)
        if stream is None:
            with self._lock:
                stream = self._streams.setdefault(key, _Stream())
        with stream.lock:
            if self._is_here(chunk_id, chunk.header):
                return False
            extent = self._room(stream, key, field, chunk)
            entry = extent.append(chunk)
            with self._lock:
                # Published only now that the bytes are complete.
                self._index[chunk_id] = entry
                self._unpinned[chunk_id] = time.monotonic()
            if tier == "disk":
                self._sync.mark(extent)
        self._populator.look_after(extent)
        if stream.spare is None and extent.rest_bytes < self.config.ahead_bytes < extent.used_bytes:
            self._make_spare(stream, key, field)
        return True

    def sync(self, run: str) -> None:
        """Return when all that was put before is on disk, whichever run it is of."""
        self._sync.sync()

    # -- reading -------------------------------------------------------------------------------

    def get(self, chunk_id: ChunkId) -> Chunk | None:
        """The chunk, its values read-only views of the mapping; None: not here, or found damaged.

        What this process did not write is verified by its checksum at first touch.
        """
        entry = self._index.get(chunk_id)
        if entry is None or entry.corrupt:
            return None
        chunk = entry.extent.chunk(chunk_id, entry)
        if not entry.verified:
            if not verify(chunk):
                entry.corrupt = True
                self._corrupt += 1
                self._log.error("chunk is damaged", chunk=chunk_id.hex, path=str(entry.extent.file.path))
                return None
            entry.verified = True
        return chunk

    def header(self, chunk_id: ChunkId) -> ChunkHeader | None:
        """The chunk's header, without touching its payload."""
        entry = self._index.get(chunk_id)
        return None if entry is None else entry.extent.header(chunk_id, entry)

    def ids(self) -> list[ChunkId]:
        with self._lock:
            return list(self._index)

    # -- attaching and letting go --------------------------------------------------------------

    def pin(self, ids: Sequence[ChunkId]) -> list[ChunkId]:
        """Mark chunks as attached to a step. Gives the ids that are missing; pins none if any is."""
        with self._lock:
            missing = [chunk_id for chunk_id in ids if chunk_id not in self._index]
            if not missing:
                for chunk_id in ids:
                    self._index[chunk_id].pinned = True
                    self._unpinned.pop(chunk_id, None)
            return missing

    def unpin(self, ids: Iterable[ChunkId]) -> None:
        """Their step did not commit after all."""
        now = time.monotonic()
        with self._lock:
            for chunk_id in ids:
                entry = self._index.get(chunk_id)
                if entry is not None:
                    entry.pinned = False
                    self._unpinned[chunk_id] = now

    def is_pinned(self, chunk_id: ChunkId) -> bool:
        entry = self._index.get(chunk_id)
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

    def orphans(self, older_than_s: float) -> list[ChunkId]:
        """Chunks that were put longer ago than that and are attached to nothing."""
        before = time.monotonic() - older_than_s
        with self._lock:
            return [chunk_id for chunk_id, put_at in self._unpinned.items() if put_at < before]

    # -- upkeep --------------------------------------------------------------------------------

    def usage(self) -> ShardUsage:
        with self._lock:
            by_run: dict[tuple[str, str], int] = {}
            for extent in self._extents:
                place = (extent.key.run, extent.key.tier)
                by_run[place] = by_run.get(place, 0) + extent.file.allocated_bytes
            zombie_bytes = self._retention.zombie_bytes
            recycled_bytes = self._recycling.kept_bytes
            used_bytes = self._space.used_bytes - recycled_bytes
            return ShardUsage(
                used_bytes, self._space.capacity_bytes, recycled_bytes, zombie_bytes, len(self._extents),
                len(self._index), self._corrupt, by_run,
            )  # fmt: skip

    def maintain(self) -> None:
        """Unlink extents without chunks, give back what nobody maps any more, make memory ready ahead."""
        self._retire_idle(self.config.seal_idle_s)
        for stream in list(self._streams.values()):
            if stream.live is not None:
                self._populator.top_up(stream.live)
        self._unlink_retired()
        self._recycling.expire()

    def close(self) -> None:
        """Seal every extent with its sidecar and let go of the mappings."""
        self._populator.stop()
        self.maintain()
        for extent in self._extents:
            if not extent.sealed:
                self._seal(extent, self._entries(extent))
            extent.file.unmap()
            extent.file.close()
        self._retention.close()
        self._recycling.clear()
        self._index.clear()
        self._extents.clear()

    # -- inside --------------------------------------------------------------------------------

    def _recover(self) -> RecoveryReport:
        for tier in ("memory", "disk"):
            self._roots.extents(tier).mkdir(parents=True, exist_ok=True)
        recovery = Recovery(self._roots, self._space)
        now = time.monotonic()
        for recovered in recovery.extents():
            extent = recovered.extent
            self._extents.add(extent)
            stream = self._streams.setdefault(extent.key, _Stream())
            stream.next_number = max(stream.next_number, extent.number + 1)
            for chunk_id, entry in recovered.located:
                if chunk_id in self._index:
                    # A second copy of the same chunk: the first one is kept.
                    extent.chunks -= 1
                    continue
                self._index[chunk_id] = entry
                self._unpinned[chunk_id] = now
        return recovery.report

    def _is_here(self, chunk_id: ChunkId, header: ChunkHeader) -> bool:
        entry = self._index.get(chunk_id)
        if entry is None:
            return False
        if entry.checksum != header.checksum:
            raise Conflict(
                f"chunk {header.id} is stored with checksum {entry.checksum}, the new one has "
                f"{header.checksum}",
                id=header.id,
            )
        return True

    def _room(self, stream: _Stream, key: ExtentKey, field: Field, chunk: Chunk) -> Extent:
        """A live extent with blocks for the chunk; the stream's lock is held."""
        needed = Extent.needed_bytes(chunk)
        extent = stream.live
        if extent is not None and extent.used_bytes + needed > extent.file.size_bytes:
            self._finish(stream)
            extent = None
        if extent is None and stream.spare is not None and needed <= stream.spare.file.size_bytes:
            extent, stream.spare = stream.spare, None
            stream.live = extent
        if extent is None:
            extent = self._create(stream, key, field, max(self.config.extent_bytes, needed))
            stream.live = extent
        step = min(self.config.grow_bytes, extent.file.size_bytes)
        try:
            try:
                extent.file.grow(extent.used_bytes + needed, step)
            except StoreFull:
                if not self.make_room():
                    raise
                extent.file.grow(extent.used_bytes + needed, step)
        except BaseException:
            if not extent.used_bytes:
                self._abandon(stream, extent)
            raise
        return extent

    def _create(self, stream: _Stream, key: ExtentKey, field: Field, size_bytes: int) -> Extent:
        path = self._roots.extent(key, stream.next_number)
        path.parent.mkdir(parents=True, exist_ok=True)
        schema = field.arrow_schema(key.group)
        recycled = self._recycling.take(key.run, path, size_bytes) if key.tier == "memory" else None
        if recycled is not None:
            extent = Extent.over(key, stream.next_number, recycled, schema)
            self._populator.prepare(extent)
        else:
            extent = Extent.create(key, stream.next_number, path, schema, size_bytes, self._space)
        if key.tier == "disk":
            sync_folders(path.parent, self._roots.extents("disk"))
        stream.next_number += 1
        with self._lock:
            self._extents.add(extent)
        return extent

    def _make_spare(self, stream: _Stream, key: ExtentKey, field: Field) -> None:
        """The extent after this one, so that its memory is ready when it is needed."""
        with stream.lock:
            if stream.spare is not None:
                return
            stream.spare = self._create(stream, key, field, self.config.extent_bytes)
        self._populator.prepare(stream.spare)

    def _abandon(self, stream: _Stream, extent: Extent) -> None:
        """Remove a new extent that got no blocks: a full store is left as it was."""
        if stream.live is extent:
            stream.live = None
        if stream.spare is extent:
            stream.spare = None
        extent.sealed = True
        with self._lock:
            self._extents.discard(extent)
        # Nothing was written, so nobody has a view of it.
        extent.file.unmap()
        extent.file.delete()

    def _finish(self, stream: _Stream) -> None:
        """Seal the stream's live extent; the stream's lock is held."""
        extent, stream.live = stream.live, None
        assert extent is not None
        self._seal(extent, self._entries(extent))
        with self._lock:
            if extent.chunks == 0:
                self._retired.append(extent)

    def _entries(self, extent: Extent) -> list[tuple[ChunkId, Entry]]:
        """What a live extent holds that is not dropped."""
        with self._lock:
            found = [(chunk_id, self._index.get(chunk_id)) for chunk_id in extent.written]
        return [(one, entry) for one, entry in found if entry is not None and entry.extent is extent]

    def _seal(self, extent: Extent, entries: Sequence[tuple[ChunkId, Entry]]) -> None:
        if extent.key.tier == "disk":
            extent.file.sync()
        extent.seal()
        if extent.key.tier == "disk":
            extent.file.sync()
        if entries:
            sidecar.write(self._roots.sidecar(extent.key, extent.number), extent, entries)

    def _forget(self, chunk_id: ChunkId) -> None:
        """Take a chunk out of the index; the lock is held."""
        entry = self._index.pop(chunk_id, None)
        self._unpinned.pop(chunk_id, None)
        if entry is None:
            return
        entry.extent.chunks -= 1
        if entry.extent.chunks == 0 and entry.extent.sealed:
            self._retired.append(entry.extent)

    def _unlink_retired(self) -> None:
        """Take names away from extents without chunks, and reclaim those that nobody maps any more."""
        with self._lock:
            retired, self._retired = self._retired, []
            self._extents.difference_update(retired)
        self._retention.retire(retired)
        self._retention.reclaim()

    def _retire_idle(self, idle_s: float) -> None:
        """Seal live extents that hold nothing and were not written to for a while."""
        before = time.monotonic() - idle_s
        for stream in list(self._streams.values()):
            extent = stream.live
            if extent is None or extent.chunks or extent.appended_at > before:
                continue
            # Never waiting for a lock: the caller may hold another stream's.
            if not stream.lock.acquire(blocking=False):
                continue
            try:
                if stream.live is extent and extent.chunks == 0 and extent.appended_at <= before:
                    self._finish(stream)
                    if stream.spare is not None:
                        self._abandon(stream, stream.spare)
            finally:
                stream.lock.release()

    def make_room(self) -> bool:
        """Give back what is allocated and holds nothing; whether that was anything."""
        before = self._space.used_bytes
        self._retire_idle(0.0)
        self._unlink_retired()
        self._recycling.clear()
        return self._space.used_bytes < before

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise StoreInUse(f"shard opened by process {self._pid}, used in its fork {os.getpid()}")
