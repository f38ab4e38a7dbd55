"""A shard: write-once chunks in extents, found by id. It knows no sessions and no segments."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np

from arrow_tq.backend import Fill
from arrow_tq.layout.columns import Values
from arrow_tq.logs import logger
from arrow_tq.store.chunk_index import ChunkIndex
from arrow_tq.store.directory import claim_memory
from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.extent_key import ExtentKey, Roots, Tier
from arrow_tq.store.granted_file import GrantedFile, Torn
from arrow_tq.store.grants import Grants
from arrow_tq.store.group_sync import GroupSync
from arrow_tq.store.populate import Populator
from arrow_tq.store.reclaiming import Reclaimer
from arrow_tq.store.recovery import Recovery, RecoveryReport
from arrow_tq.store.recycling import Recycling
from arrow_tq.store.retention import Retention
from arrow_tq.store.shard_config import ShardConfig, ShardUsage
from arrow_tq.store.space import RunSpaces, Space
from arrow_tq.store.stream import Stream, StreamSite
from arrow_tq.store.streams import Streams
from arrow_tq_schemas.bundles import UNKNOWN_CHECKSUM, checksummed
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, verify
from arrow_tq_schemas.errors import ArrowTQError, Conflict, StoreInUse
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
        self.index = ChunkIndex()
        self._entries = self.index.entries
        self._streams = Streams(self._roots)
        self._recycling = Recycling(
            config.memory_dir / "recycled", config.recycle_bytes, config.recycle_idle_s
        )
        self._retention = Retention(self._roots, self._recycling)
        self._left_granted: list[tuple[Extent, GrantedFile]] = []
        self._closed = False
        self._log = logger("arrow_tq.shard")
        # Bound methods: nothing is added to what is called for each chunk.
        self.is_here = self.index.is_here
        self.holds = self.index.holds
        self.ids = self.index.ids
        self.pin = self.index.pin
        self.unpin = self.index.unpin
        self.is_pinned = self.index.is_pinned
        self.drop = self.index.drop
        self.drop_unpinned = self.index.drop_unpinned
        self.keep_unpinned = self.index.keep_unpinned
        self.drop_orphans = self.index.drop_orphans
        self.orphans = self.index.orphans
        self.adopt = self.index.publish_all
        self.recovery = self._recover()
        self._populator = Populator(config.grow_bytes, config.ahead_bytes)
        self._site = StreamSite(
            config=config,
            roots=self._roots,
            spaces=self._spaces,
            recycling=self._recycling,
            populator=self._populator,
            added=self.index.added,
            removed=self.index.removed,
            finished=self.index.finished,
            entries=self.index.kept,
            make_room=self.make_room,
        )
        self.grants = Grants(self._site, self)
        for extent, file in self._left_granted:
            self.grants.take_over(extent, file)
        self._reclaimer = Reclaimer(
            lambda: self._retention.look_after(self.index, self._streams.emptied, GrantedFile)
        )
        self.index.when_retired = self._reclaimer.note

    # -- writing -------------------------------------------------------------------------------

    def put(self, field: Field, chunk: Chunk, durability: Durability) -> bool:
        """Store a chunk. True: it is new; False: the same chunk was here already.

        Raises:
            Conflict: another chunk of that id is here; names both checksums.
            StoreFull: no room; nothing was written.
            StoreInUse: in a fork of the process that opened the shard.
        """
        key = self._key(chunk.header, durability)
        with self._locked(key, field) as stream:
            is_new = self._append(stream, chunk)
            if is_new and stream.live is not None:
                self._after_append(stream, stream.live)
        return is_new

    def put_many(
        self, field: Field, chunks: Sequence[Chunk], durability: Durability
    ) -> list[ArrowTQError | None]:
        """Store chunks of one run, field and layer group; None for each that is here now, else its error."""
        errors: list[ArrowTQError | None] = [None] * len(chunks)
        if not chunks:
            return errors
        with self._locked(self._key(chunks[0].header, durability), field) as stream:
            for index, chunk in enumerate(chunks):
                try:
                    self._append(stream, chunk)
                except ArrowTQError as error:
                    errors[index] = error
            if stream.live is not None:
                self._after_append(stream, stream.live)
        return errors

    def _key(self, header: ChunkHeader, durability: Durability) -> ExtentKey:
        tier: Tier = "disk" if durability == "disk" else "memory"
        return ExtentKey(header.run, header.field, header.chunk_id.group, tier)

    @contextmanager
    def _locked(self, key: ExtentKey, field: Field) -> Iterator[Stream]:
        self.check_process()
        stream = self.locked_stream(key, field)
        try:
            yield stream
        finally:
            stream.lock.release()

    def _append(self, stream: Stream, chunk: Chunk) -> bool:
        """False: it was here already. The stream's lock is held."""
        header = chunk.header
        self.check_open(f"chunk {header.id}")
        chunk_id = header.chunk_id
        if self.is_here(chunk_id, header.run, header.checksum):
            return False
        extent = stream.room(header.rows, chunk.valid is not None)
        self.index.publish(chunk_id, extent.append(chunk))
        if extent.key.tier == "disk":
            self._sync.mark(extent)
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
            if header.checksum == UNKNOWN_CHECKSUM:
                header = checksummed(header, values, fill(values))
            else:
                deque(fill(values), 0)
            entry = extent.complete(
                *(chunk_id, reserved, header.to_bytes(), header.epoch, header.start, header.checksum)
            )
            self.index.publish(chunk_id, entry)
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
        entry = self._entries.get(chunk_id)
        if entry is None or entry.corrupt:
            return None
        try:
            chunk = entry.extent.chunk(chunk_id, entry)
        except Torn:
            self.index.damaged(chunk_id, entry)
            return None
        except ValueError:
            if not entry.extent.retired and not self._closed:
                raise
            # Dropped, and unmapped, since it was looked up.
            return None
        if entry.extent.retired:
            # Dropped meanwhile: what was copied of a client's file may be another grant's already.
            return None
        if not entry.verified:
            if not verify(chunk):
                self.index.damaged(chunk_id, entry)
                return None
            entry.verified = True
        return chunk

    def source(self, chunk_id: ChunkId) -> Chunk | Entry | None:
        """The chunk as views, or, in a file that a client may cut, where to read it; None as ``get``."""
        entry = self._entries.get(chunk_id)
        if entry is None or not isinstance(entry.extent.file, GrantedFile) or entry.nullable:
            return self.get(chunk_id)
        if entry.corrupt or (not entry.verified and self.get(chunk_id) is None):
            return None
        return entry

    def part(self, chunk_id: ChunkId, entry: Entry, row: int, rows: int) -> Values | None:
        """Rows of a chunk without null ones, read where that is needed; None where they are there no more."""
        try:
            values = entry.extent.part(entry, row, rows)
        except Torn:
            self.index.damaged(chunk_id, entry)
        except (ValueError, OSError):
            if not entry.extent.retired and not self._closed:
                raise
        else:
            return None if entry.extent.retired else values
        return None

    def located(self, chunk_id: ChunkId) -> Entry | None:
        """Where an attached chunk is, verified; None: not here, not attached, or damaged."""
        entry = self._entries.get(chunk_id)
        if entry is None or not entry.pinned or entry.corrupt:
            return None
        if not entry.verified and self.get(chunk_id) is None:
            return None
        return entry

    def header(self, chunk_id: ChunkId) -> ChunkHeader | None:
        """The chunk's header, without touching its payload."""
        entry = self._entries.get(chunk_id)
        return None if entry is None or entry.corrupt else entry.extent.header(chunk_id, entry)

    def sha256(self, ids: Iterable[ChunkId]) -> str:
        """Digest, as hex, of these chunks' values one after another; of what is not here, nothing."""
        digest = hashlib.sha256()
        for chunk_id in ids:
            chunk = self.get(chunk_id)
            if chunk is not None:
                digest.update(chunk.values.data)
        return digest.hexdigest()

    # -- upkeep --------------------------------------------------------------------------------

    def level(self) -> tuple[int, int]:
        """Bytes used, and the capacity: all that an admission asks."""
        return self._space.used_bytes - self._recycling.kept_bytes, self._space.capacity_bytes

    def usage(self) -> ShardUsage:
        extents = self.index.list_extents()
        by_run: dict[tuple[str, str], int] = {}
        for extent in extents:
            place = (extent.key.run, extent.key.tier)
            by_run[place] = by_run.get(place, 0) + extent.file.allocated_bytes
        recycled_bytes = self._recycling.kept_bytes
        used_bytes = self._space.used_bytes - recycled_bytes
        return ShardUsage(
            used_bytes, self._space.capacity_bytes, recycled_bytes, self._retention.zombie_bytes,
            len(extents), len(self._entries), self.index.corrupt, by_run, self._spaces.quotas(),
        )  # fmt: skip

    def maintain(self) -> None:
        """Unlink extents without chunks, give back what nobody maps any more, make memory ready ahead."""
        for stream in self._streams.all():
            stream.retire_idle(self.config.seal_idle_s)
            if stream.live is not None:
                self._populator.top_up(stream.live)
        self.grants.maintain()
        self._retention.look_after(self.index, self._streams.emptied)
        self._recycling.expire()
        self._streams.tidy({extent.key for extent in self.index.list_extents()})

    def note_lost(self, chunks: int, size: int) -> None:
        """What the catalog knows and recovery did not find: chunks, and bytes of payload."""
        self.recovery = replace(self.recovery, lost_chunks=chunks, lost_bytes=size)

    def close(self) -> None:
        """Seal every extent with its sidecar and let go of the mappings. In a fork: nothing."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._populator.stop()
        self._reclaimer.stop()
        for stream in self._streams.all():
            if not stream.lock.acquire(timeout=CLOSE_WAIT_S):
                # Its writer was interrupted at the worst moment: the next start walks its extent.
                self._log.error("a writer does not let go", path=str(stream.key.folder))
                continue
            try:
                stream.close()
            finally:
                stream.lock.release()
        self._retention.look_after(self.index, self._streams.emptied)
        for extent in self.index.extents:
            extent.file.unmap()
            extent.file.close()
        self._retention.close()
        self._recycling.clear()
        self.index.clear()

    def locked_stream(self, key: ExtentKey, field: Field) -> Stream:
        """Where the chunks of a key go, its lock held."""
        return self._streams.locked(key, field, self._site)

    def locked_stream_at_once(self, key: ExtentKey, field: Field) -> Stream | None:
        """The same; None where another writer has the lock."""
        return self._streams.locked_at_once(key, field, self._site)

    def seal_granted(self, extent: Extent) -> None:
        """No chunk is adopted in it any more."""
        extent.sealed = True
        self.index.finished(extent)

    # -- inside --------------------------------------------------------------------------------

    def _recover(self) -> RecoveryReport:
        for tier in ("memory", "disk"):
            self._roots.extents(tier).mkdir(parents=True, exist_ok=True)
        recovery = Recovery(self._roots, self._spaces)
        for recovered in recovery.extents():
            extent = recovered.extent
            if isinstance(extent.file, GrantedFile):
                self._left_granted.append((extent, extent.file))
            # They come in order of their numbers.
            self._streams.number_after(extent.key, extent.number)
            self.index.recovered(extent, recovered.located)
        self._streams.find_empty()
        return recovery.report

    def publish(self, stream: Stream, chunk_id: ChunkId, entry: Entry) -> None:
        """Show a chunk that was completed in its place; the stream's lock is held."""
        self.index.publish(chunk_id, entry)
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

    def make_room(self) -> bool:
        """Give back what is allocated and holds nothing; whether that was anything."""
        before = self._space.used_bytes
        for stream in self._streams.all():
            stream.retire_idle(0.0)
            stream.give_back()
        self.grants.cut(0.0)
        self._retention.look_after(self.index, self._streams.emptied)
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
