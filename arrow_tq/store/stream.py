"""Where the chunks of one key are appended: a live extent, and the one after it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from arrow_tq.layout.columns import ColumnLayout
from arrow_tq.logs import logger
from arrow_tq.store import extent_schema, sidecar
from arrow_tq.store.extent import Entry, Extent, needed_bytes
from arrow_tq.store.extent_key import ExtentKey, Roots, sync_folders
from arrow_tq.store.populate import Populator
from arrow_tq.store.recycling import Recycling
from arrow_tq.store.shard_config import ShardConfig
from arrow_tq.store.space import RunSpaces
from arrow_tq_schemas.blobs import BLOB_FIELD
from arrow_tq_schemas.errors import StoreFull, Unavailable
from arrow_tq_schemas.ids import ChunkId


@dataclass(frozen=True, slots=True, eq=False)
class StreamSite:
    """What the streams of a shard share.

    Attributes:
        added, removed: told of each extent that comes, and of one that was never written.
        finished: told of each extent that was sealed.
        entries: what an extent holds that is not dropped.
        make_room: called when the store is full; whether that helped.
    """

    config: ShardConfig
    roots: Roots
    spaces: RunSpaces
    recycling: Recycling
    populator: Populator
    added: Callable[[Extent], None]
    removed: Callable[[Extent], None]
    finished: Callable[[Extent], None]
    entries: Callable[[Extent], Sequence[tuple[ChunkId, Entry]]]
    make_room: Callable[[], bool]


class Stream:
    """One writer at a time: ``room``, ``make_spare`` and ``close`` want ``lock`` held.

    Attributes:
        live: the extent that is appended to.
        spare: the one after it, made ready in the background when the live one is nearly full.
        gone: its folders were removed; whoever wants to append opens another.
    """

    def __init__(self, key: ExtentKey, schema: pa.Schema, first_number: int, site: StreamSite) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.live: Extent | None = None
        self.spare: Extent | None = None
        self.gone = False
        self.next_number = first_number
        self._site = site
        self._extent_bytes = _extent_bytes(site, key)
        self._schema = extent_schema.stamp(schema, key)
        self.layout = ColumnLayout(self._schema)
        extent_schema.keep_copy(site.roots.sidecars(key), self._schema, key)

    @property
    def schema(self) -> pa.Schema:
        """As extents carry it."""
        return self._schema

    def room(self, rows: int, nullable: bool = False) -> Extent:
        """A live extent with blocks for a chunk of so many rows, with or without validity bits.

        Raises:
            StoreFull: none can be had; nothing was left behind.
        """
        needed = needed_bytes(self.layout, rows, nullable)
        try:
            return self._allocated(needed)
        except StoreFull:
            if self.live is not None and self.live.chunks == 0:
                # All of it is dropped: its own room will do.
                self._finish(self.live)
            if not self._site.make_room():
                raise
        return self._allocated(needed)

    def make_spare(self) -> None:
        """Create the next extent, so that its memory is ready when it is needed."""
        if self.spare is not None:
            return
        try:
            self.spare = self._create(self._extent_bytes)
        except Unavailable as error:
            # What was put is stored; whoever needs the next extent meets the same bound and is told.
            logger("arrow_tq.shard").info("no spare extent", error=error.message)
            return
        self._site.populator.prepare(self.spare)

    def retire_idle(self, idle_s: float) -> None:
        """Seal a live extent that holds nothing and was not written to for a while."""
        before = time.monotonic() - idle_s
        extent = self.live
        if extent is None or extent.chunks or extent.appended_at > before:
            return
        # Never waiting for the lock: the caller may hold another stream's.
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.live is extent and extent.chunks == 0 and extent.appended_at <= before:
                self._finish(extent)
                self._abandon(self.spare)
        finally:
            self.lock.release()

    def give_back(self) -> None:
        """Give back what was made ready ahead; a stream that is being written to keeps it."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._abandon(self.spare)
            if self.live is not None:
                self.live.file.trim(self.live.used_bytes)
        finally:
            self.lock.release()

    def close(self) -> None:
        """Seal what there is."""
        self._abandon(self.spare)
        if self.live is not None:
            self._finish(self.live)

    def _allocated(self, needed_bytes: int) -> Extent:
        extent = self.live
        if extent is not None and extent.used_bytes + needed_bytes > extent.file.size_bytes:
            self._finish(extent)
            extent = None
        if extent is None and self.spare is not None and needed_bytes <= self.spare.file.size_bytes:
            extent, self.spare = self.spare, None
        if extent is None:
            extent = self._create(max(self._extent_bytes, needed_bytes))
        self.live = extent
        try:
            step = min(self._site.config.grow_bytes, extent.file.size_bytes)
            extent.file.grow(extent.used_bytes + needed_bytes, step)
        except BaseException:
            if not extent.used_bytes:
                self._abandon(extent)
            raise
        return extent

    def _create(self, size_bytes: int) -> Extent:
        site, key = self._site, self.key
        path = site.roots.extent(key, self.next_number)
        recycled = site.recycling.take(key.run, path, size_bytes) if key.tier == "memory" else None
        if recycled is not None:
            extent = Extent.over(key, self.next_number, recycled, self._schema, self.layout)
            site.populator.prepare(extent)
        else:
            extent = self._new_extent(path, size_bytes)
        if key.tier == "disk":
            sync_folders(path.parent, site.roots.extents("disk"))
        self.next_number += 1
        site.added(extent)
        return extent

    def _new_extent(self, path: Path, size_bytes: int) -> Extent:
        try:
            space = self._site.spaces.of(self.key.run)
            return Extent.create(
                *(self.key, self.next_number, path, self._schema, size_bytes, space, self.layout)
            )
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise Unavailable(f"cannot open {path}: {error.strerror}", path=str(path)) from error

    def _abandon(self, extent: Extent | None) -> None:
        """Remove an extent that holds nothing yet: a full store is left as it was."""
        if extent is None:
            return
        if self.live is extent:
            self.live = None
        if self.spare is extent:
            self.spare = None
        extent.sealed = True
        self._site.removed(extent)
        # Nothing was written, so nobody has a view of it.
        extent.file.unmap()
        extent.file.delete()

    def _finish(self, extent: Extent) -> None:
        """Seal the live extent, with its sidecar."""
        self.live = None
        entries = self._site.entries(extent)
        if self.key.tier == "disk":
            extent.file.sync()
        extent.seal()
        if self.key.tier == "disk":
            extent.file.sync()
        if entries:
            self._write_sidecar(extent, entries)
        self._site.finished(extent)

    def _write_sidecar(self, extent: Extent, entries: Sequence[tuple[ChunkId, Entry]]) -> None:
        try:
            sidecar.write(self._site.roots.sidecar(self.key, extent.number), extent, entries)
        except OSError:
            # Without it the extent is walked at the next start: slower, and nothing is lost.
            logger("arrow_tq.shard").exception("no sidecar", path=str(extent.file.path))


def _extent_bytes(site: StreamSite, key: ExtentKey) -> int:
    """Size of a key's extents: many fit in its run's quota, since an extent goes only with its last chunk."""
    config = site.config
    whole = config.blob_extent_bytes if key.field == BLOB_FIELD.name else config.extent_bytes
    quota_bytes = site.spaces.of(key.run).quota_bytes
    return whole if quota_bytes is None else min(whole, max(quota_bytes // 8, config.grow_bytes))
