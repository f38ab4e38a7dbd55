"""What becomes of an extent whose chunks are all released: its name goes at once, its bytes when they can."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from arrow_tq.store.extent import Extent
from arrow_tq.store.extent_key import Roots
from arrow_tq.store.recycling import Recycling


class Retention:
    """Extents without a name that somebody may still map. Their bytes count as used until nobody does."""

    def __init__(self, roots: Roots, recycling: Recycling) -> None:
        self._roots = roots
        self._recycling = recycling
        self._lock = threading.Lock()
        self._reclaiming = threading.Lock()
        self._zombies: list[Extent] = []

    @property
    def zombie_bytes(self) -> int:
        with self._lock:
            return sum(extent.file.allocated_bytes for extent in self._zombies)

    def retire(self, extents: Iterable[Extent]) -> None:
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

    def reclaim(self) -> None:
        """Recycle or give back those that nobody maps any more."""
        with self._reclaiming:
            with self._lock:
                zombies = list(self._zombies)
            gone = [extent for extent in zombies if extent.file.nobody_maps()]
            for extent in gone:
                if extent.key.tier == "memory":
                    self._recycling.offer(extent.file.pool + extent.key.run, extent.file)
                else:
                    extent.file.delete()
            with self._lock:
                self._zombies = [extent for extent in self._zombies if extent not in gone]

    def close(self) -> None:
        """Remove what is left of them; mappings of others live on."""
        with self._lock:
            for extent in self._zombies:
                extent.file.path.unlink(missing_ok=True)
                extent.file.close()
            self._zombies.clear()
