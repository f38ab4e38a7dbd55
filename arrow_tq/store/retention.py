"""What becomes of an extent whose chunks are all released: its name goes at once, its bytes when they can."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from arrow_tq.store.chunk_index import ChunkIndex
from arrow_tq.store.extent import Extent
from arrow_tq.store.extent_key import ExtentKey, Roots
from arrow_tq.store.mapped_file import MappedFile
from arrow_tq.store.recycling import Recycling


class Retention:
    """Extents without a name that somebody may still map. Their bytes count as used until nobody does."""

    def __init__(self, roots: Roots, recycling: Recycling) -> None:
        self._roots = roots
        self._recycling = recycling
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._zombies: list[Extent] = []

    @property
    def zombie_bytes(self) -> int:
        with self._lock:
            return sum(extent.file.allocated_bytes for extent in self._zombies)

    def look_after(
        self, index: ChunkIndex, emptied: Callable[[ExtentKey], None], files: type[MappedFile] = MappedFile
    ) -> bool:
        """Take the names of retired extents away, and reclaim what nobody maps; whether others are left.

        When it returns, nothing that was retired before has a name any more, whoever was to see to it.

        Args:
            emptied: told of the key of each.
            files: only those in files of this type.
        """
        with self._looking:
            retired = index.take_retired(files)
            self._retire(retired)
            for extent in retired:
                emptied(extent.key)
            return self._reclaim(files)

    def _retire(self, extents: Iterable[Extent]) -> None:
        """Take their names away: nobody finds them any more."""
        for extent in extents:
            self._roots.sidecar(extent.key, extent.number).unlink(missing_ok=True)
            self._roots.adopted(extent.key, extent.number).unlink(missing_ok=True)
            if extent.key.tier == "memory":
                self._recycling.put_aside(extent.file)
            else:
                extent.file.path.unlink()
            with self._lock:
                self._zombies.append(extent)

    def _reclaim(self, files: type[MappedFile]) -> bool:
        """Recycle or give back those that nobody maps any more; whether others are left."""
        with self._lock:
            zombies = [extent for extent in self._zombies if isinstance(extent.file, files)]
        gone = [extent for extent in zombies if extent.file.nobody_maps()]
        for extent in gone:
            if extent.key.tier == "memory":
                self._recycling.offer(extent.file.pool + extent.key.run, extent.file)
            else:
                extent.file.free()
        with self._lock:
            self._zombies = [extent for extent in self._zombies if extent not in gone]
            return len(zombies) > len(gone)

    def close(self) -> None:
        """Remove what is left of them; mappings of others live on."""
        with self._lock:
            for extent in self._zombies:
                extent.file.path.unlink(missing_ok=True)
                extent.file.close()
            self._zombies.clear()
