"""A shard: write-once chunks in extents, found by id. It knows no sessions and no segments."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from arrow_tq.backend import Fill
from arrow_tq.layout.columns import Values
from arrow_tq.logs import logger
from arrow_tq.store.directory import claim_memory
from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.extent_key import ExtentKey, Roots, Tier
from arrow_tq.store.granted_file import GrantedFile, Torn
from arrow_tq.store.grants import Grants
from arrow_tq.store.group_sync import GroupSync
from arrow_tq.store.populate import Populator
from arrow_tq.store.recovery import Recovery, RecoveryReport
from arrow_tq.store.recycling import Recycling
from arrow_tq.store.retention import Retention
from arrow_tq.store.shard_config import ShardConfig, ShardUsage
from arrow_tq.store.space import RunSpaces, Space
from arrow_tq.store.stream import Stream, StreamSite
from arrow_tq.store.streams import Streams
from arrow_tq_schemas.bundles import UNKNOWN_CHECKSUM, checksummed
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, verify
from arrow_tq_schemas.errors import Conflict, StoreInUse
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId

Durability = Literal["process", "disk"]
CLOSE_WAIT_S = 10.0
"""How long ``close`` waits for the writer of a stream."""


class Shard:
    """Keeps chunks. Thread-safe; readers never wait for writers.

    Opening recovers what an earlier process left; ``recovery`` says what that was.
    """

    def __init__(self, config: ShardConfig) -> None:
        self.config = config
        self._pid = os.getpid()
        claim_memory(config.memory_dir, config.data_dir)
        self._roots = Roots(config.data_dir, config.memory_dir)
        self._space = Space(config.capacity_bytes)
        self._spaces = RunSpaces(self._space, config.run_quotas, config.run_quota_bytes)
        self._sync = GroupSync()
        self._lock = threading.Lock()
        """Guards the index's pins, the unpinned and the extents' counts."""
        self._index: dict[ChunkId, Entry] = {}
        self._unpinned: dict[ChunkId, float] = {}
        self._streams = Streams(self._roots)
        self._extents: set[Extent] = set()
        self._retired: list[Extent] = []
        """Without chunks: to be unlinked by upkeep."""
        self._recycling = Recycling(
            config.memory_dir / "recycled", config.recycle_bytes, config.recycle_idle_s
        )
        self._retention = Retention(self._roots, self._recycling)
        self._left_granted: list[tuple[Extent, GrantedFile]] = []
        self._corrupt = 0
        self._closed = False
        self._log = logger("arrow_tq.shard")
        self.recovery = self._recover()
        self._populator = Populator(config.grow_bytes, config.ahead_bytes)
        self._site = StreamSite(
            config=config,
            roots=self._roots,
            spaces=self._spaces,
            recycling=self._recycling,
            populator=self._populator,
            added=self._added,
            removed=self._removed,
            finished=self._finished,
            entries=self._entries,
            make_room=self.make_room,
        )
        self.grants = Grants(self._site, self)
        for extent, file in self._left_granted:
            self.grants.take_over(extent, file)

    # -- writing -------------------------------------------------------------------------------

    def put(self, field: Field, chunk: Chunk, durability: Durability) -> bool:
        """Store a chunk. True: it is new; False: the same chunk was here already.

        Raises:
            Conflict: another chunk of that id is here; names both checksums.
            StoreFull: no room; nothing was written.
            StoreInUse: in a fork of the process that opened the shard.
        """
        self.check_process()
        chunk_id = chunk.header.chunk_id
        tier: Tier = "disk" if durability == "disk" else "memory"
        key = ExtentKey(chunk.header.run, chunk.header.field, chunk_id.group, tier)
        stream = self.locked_stream(key, field)
        try:
            self.check_open(f"chunk {chunk.header.id}")
            if self.is_here(chunk_id, chunk.header.run, chunk.header.checksum):
                return False
            extent = stream.room(chunk.header.rows, chunk.valid is not None)
            self._publish(chunk_id, extent.append(chunk))
            self._after_append(stream, extent)
        finally:
            stream.lock.release()
        return True

    def fill(self, field: Field, header: ChunkHeader, fill: Fill, durability: Durability) -> str:
        """Store a chunk of ``header.rows`` bytes that ``fill`` writes where they will stay.

        ``field`` is one of plain uint8. Gives the checksum, computed where the header has none yet. When
        ``fill`` raises, nothing was stored. Raises what ``put`` raises.
        """
        self.check_process()
        chunk_id = header.chunk_id
        tier: Tier = "disk" if durability == "disk" else "memory"
        key = ExtentKey(header.run, header.field, chunk_id.group, tier)
        stream = self.locked_stream(key, field)
        try:
            self.check_open(f"chunk {header.id}")
            if self.is_here(chunk_id, header.run, header.checksum):
                return header.checksum
            extent = stream.room(header.rows)
            # As long with any other checksum: the values come first, and are hashed where they lie.
            reserved = extent.reserve(header.rows, len(header.to_bytes()))
            values = reserved.values.view(np.uint8)
            fill(values)
            if header.checksum == UNKNOWN_CHECKSUM:
                header = checksummed(header, values)
            entry = extent.complete(
                *(chunk_id, reserved, header.to_bytes(), header.epoch, header.start, header.checksum)
            )
            self._publish(chunk_id, entry)
            self._after_append(stream, extent)
        finally:
            stream.lock.release()
        return header.checksum

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
        try:
            chunk = entry.extent.chunk(chunk_id, entry)
        except Torn:
            self._damaged(chunk_id, entry)
            return None
        except ValueError:
            if not entry.extent.retired and not self._closed:
                raise
            # Dropped, and unmapped, since it was looked up.
            return None
        if not entry.verified:
            if not verify(chunk):
                self._damaged(chunk_id, entry)
                return None
            entry.verified = True
        return chunk

    def source(self, chunk_id: ChunkId) -> Chunk | Entry | None:
        """The chunk as views, or, in a file that a client may cut, where to read it; None as ``get``."""
        entry = self._index.get(chunk_id)
        if entry is None or not isinstance(entry.extent.file, GrantedFile) or entry.nullable:
            return self.get(chunk_id)
        if entry.corrupt or (not entry.verified and self.get(chunk_id) is None):
            return None
        return entry

    def part(self, chunk_id: ChunkId, entry: Entry, row: int, rows: int) -> Values | None:
        """Rows of a chunk without null ones, read where that is needed; None where they are there no more."""
        try:
            return entry.extent.part(entry, row, rows)
        except Torn:
            self._damaged(chunk_id, entry)
        except (ValueError, OSError):
            if not entry.extent.retired and not self._closed:
                raise
        return None

    def located(self, chunk_id: ChunkId) -> Entry | None:
        """Where an attached chunk is, verified; None: not here, not attached, or damaged."""
        entry = self._index.get(chunk_id)
        if entry is None or not entry.pinned or entry.corrupt:
            return None
        if not entry.verified and self.get(chunk_id) is None:
            return None
        return entry

    def header(self, chunk_id: ChunkId) -> ChunkHeader | None:
        """The chunk's header, without touching its payload."""
        entry = self._index.get(chunk_id)
        return None if entry is None or entry.corrupt else entry.extent.header(chunk_id, entry)

    def holds(self, chunk_id: ChunkId) -> bool:
        """Whether the chunk is here and not known to be damaged."""
        entry = self._index.get(chunk_id)
        return entry is not None and not entry.corrupt

    def sha256(self, ids: Iterable[ChunkId]) -> str:
        """Digest, as hex, of these chunks' values one after another; of what is not here, nothing."""
        digest = hashlib.sha256()
        for chunk_id in ids:
            chunk = self.get(chunk_id)
            if chunk is not None:
                digest.update(chunk.values.data)
        return digest.hexdigest()

    def ids(self) -> list[ChunkId]:
        with self._lock:
            return list(self._index)

    # -- attaching and letting go --------------------------------------------------------------

    def pin(self, ids: Sequence[ChunkId]) -> list[ChunkId]:
        """Mark chunks as attached to a step. Gives the ids that are missing; pins none if any is."""
        with self._lock:
            missing = [one for one in ids if (entry := self._index.get(one)) is None or entry.corrupt]
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
                len(self._index), self._corrupt, by_run, self._spaces.quotas(),
            )  # fmt: skip

    def maintain(self) -> None:
        """Unlink extents without chunks, give back what nobody maps any more, make memory ready ahead."""
        for stream in self._streams.all():
            stream.retire_idle(self.config.seal_idle_s)
            if stream.live is not None:
                self._populator.top_up(stream.live)
        self.grants.maintain()
        self._unlink_retired()
        self._recycling.expire()
        with self._lock:
            used = {extent.key for extent in self._extents}
        self._streams.tidy(used)

    def note_lost(self, chunks: int, size: int) -> None:
        """What the catalog knows and recovery did not find: chunks, and bytes of payload."""
        self.recovery = replace(self.recovery, lost_chunks=chunks, lost_bytes=size)

    def close(self) -> None:
        """Seal every extent with its sidecar and let go of the mappings. In a fork: nothing."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._populator.stop()
        for stream in self._streams.all():
            if not stream.lock.acquire(timeout=CLOSE_WAIT_S):
                # Its writer was interrupted at the worst moment: the next start walks its extent.
                self._log.error("a writer does not let go", path=str(stream.key.folder))
                continue
            try:
                stream.close()
            finally:
                stream.lock.release()
        self._unlink_retired()
        for extent in self._extents:
            extent.file.unmap()
            extent.file.close()
        self._retention.close()
        self._recycling.clear()
        self._index.clear()
        self._extents.clear()

    def locked_stream(self, key: ExtentKey, field: Field) -> Stream:
        """Where the chunks of a key go, its lock held."""
        return self._streams.locked(key, field, self._site)

    def locked_stream_at_once(self, key: ExtentKey, field: Field) -> Stream | None:
        """The same; None where another writer has the lock."""
        return self._streams.locked_at_once(key, field, self._site)

    def adopt(self, chunk_id: ChunkId, entry: Entry) -> None:
        """Show a chunk that a client wrote."""
        self._publish(chunk_id, entry)

    def seal_granted(self, extent: Extent) -> None:
        """No chunk is adopted in it any more."""
        extent.sealed = True
        self._finished(extent)

    # -- inside --------------------------------------------------------------------------------

    def _recover(self) -> RecoveryReport:
        for tier in ("memory", "disk"):
            self._roots.extents(tier).mkdir(parents=True, exist_ok=True)
        recovery = Recovery(self._roots, self._spaces)
        now = time.monotonic()
        for recovered in recovery.extents():
            extent = recovered.extent
            self._extents.add(extent)
            if isinstance(extent.file, GrantedFile):
                self._left_granted.append((extent, extent.file))
            # They come in order of their numbers.
            self._streams.number_after(extent.key, extent.number)
            for chunk_id, entry in recovered.located:
                if chunk_id in self._index:
                    # A second copy of the same chunk: the first one is kept.
                    extent.chunks -= 1
                    continue
                self._index[chunk_id] = entry
                self._unpinned[chunk_id] = now
        self._streams.find_empty()
        return recovery.report

    def is_here(self, chunk_id: ChunkId, run: str, checksum: str) -> bool:
        """Whether the same chunk is stored; raises ``Conflict`` where another one has its id."""
        entry = self._index.get(chunk_id)
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

    def publish(self, stream: Stream, chunk_id: ChunkId, entry: Entry) -> None:
        """Show a chunk that was completed in its place; the stream's lock is held."""
        self._publish(chunk_id, entry)
        self._after_append(stream, entry.extent)

    def withdraw(self, stored: Sequence[tuple[Stream, ChunkId, Entry]]) -> None:
        """Forget chunks of a put that failed, the last one first, and use their room again if possible."""
        for stream, chunk_id, entry in reversed(stored):
            with stream.lock:
                if self.drop_unpinned([chunk_id]) and stream.live is entry.extent:
                    entry.extent.take_back(entry)

    def _after_append(self, stream: Stream, extent: Extent) -> None:
        if extent.key.tier == "disk":
            self._sync.mark(extent)
        if extent.rest_bytes < self.config.ahead_bytes < extent.used_bytes:
            stream.make_spare()
        self._populator.look_after(extent)

    def _publish(self, chunk_id: ChunkId, entry: Entry) -> None:
        """Show a chunk whose bytes are complete."""
        with self._lock:
            damaged = self._index.get(chunk_id)
            if damaged is not None:
                self._forget(chunk_id)
                entry.pinned = damaged.pinned
            self._index[chunk_id] = entry
            entry.extent.chunks += 1
            if not entry.pinned:
                self._unpinned[chunk_id] = time.monotonic()

    def _damaged(self, chunk_id: ChunkId, entry: Entry) -> None:
        with self._lock:
            self._corrupt += not entry.corrupt
            entry.corrupt = True
        self._log.error("chunk is damaged", chunk=chunk_id.hex, path=str(entry.extent.file.path))

    def _added(self, extent: Extent) -> None:
        with self._lock:
            self._extents.add(extent)

    def _removed(self, extent: Extent) -> None:
        with self._lock:
            self._extents.discard(extent)

    def _finished(self, extent: Extent) -> None:
        with self._lock:
            self._retire_if_empty(extent)

    def _entries(self, extent: Extent) -> list[tuple[ChunkId, Entry]]:
        """What a live extent holds that is not dropped."""
        with self._lock:
            found = [(chunk_id, self._index.get(chunk_id)) for chunk_id in extent.written]
        return [(one, entry) for one, entry in found if entry is not None and entry.extent is extent]

    def _forget(self, chunk_id: ChunkId) -> None:
        """Take a chunk out of the index; the lock is held."""
        entry = self._index.pop(chunk_id, None)
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

    def _unlink_retired(self) -> None:
        """Take names away from extents without chunks, and reclaim those that nobody maps any more."""
        with self._lock:
            retired, self._retired = self._retired, []
            self._extents.difference_update(retired)
        self._retention.retire(retired)
        for extent in retired:
            self._streams.emptied(extent.key)
        self._retention.reclaim()

    def make_room(self) -> bool:
        """Give back what is allocated and holds nothing; whether that was anything."""
        before = self._space.used_bytes
        for stream in self._streams.all():
            stream.retire_idle(0.0)
            stream.give_back()
        self._unlink_retired()
        self._recycling.clear()
        return self._space.used_bytes < before

    def check_open(self, what: str) -> None:
        """Raise ``Conflict`` after ``close``. For writers, under their stream's lock."""
        if self._closed:
            raise Conflict(f"{what}: the shard was closed")

    def check_process(self) -> None:
        """Raise ``StoreInUse`` in a fork of the process that opened the shard."""
        if self._pid != os.getpid():
            raise StoreInUse(f"shard opened by process {self._pid}, used in its fork {os.getpid()}")
