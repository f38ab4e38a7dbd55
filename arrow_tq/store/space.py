"""How many payload bytes a shard may allocate, and how many it has."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from arrow_tq_schemas.errors import QuotaExceeded, StoreFull


class Space:
    """Counts allocated bytes of extents, unlinked ones that are still mapped included. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, size: int) -> None:
        """Reserve bytes before they are allocated.

        Raises:
            StoreFull: naming needed, used and capacity bytes.
        """
        with self._lock:
            if self._used_bytes + size > self.capacity_bytes:
                raise StoreFull(
                    f"no room for {size} bytes: {self._used_bytes} of {self.capacity_bytes} are used",
                    needed_bytes=size,
                    used_bytes=self._used_bytes,
                    capacity_bytes=self.capacity_bytes,
                )
            self._used_bytes += size

    def adopt(self, size: int) -> None:
        """Count bytes that an earlier process allocated, whatever the capacity says now."""
        with self._lock:
            self._used_bytes += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used_bytes -= size


class RunSpace(Space):
    """One run's part of a store's space. Its bytes count in both."""

    def __init__(self, store: Space, run: str, quota_bytes: int | None) -> None:
        super().__init__(store.capacity_bytes if quota_bytes is None else quota_bytes)
        self._store = store
        self._run = run
        self.quota_bytes = quota_bytes

    def take(self, size: int) -> None:
        """Reserve bytes of the run's quota, and of the store.

        Raises:
            QuotaExceeded: naming run, needed, used and quota bytes; other runs are not concerned.
            StoreFull: the store has no room.
        """
        with self._lock:
            if self.quota_bytes is not None and self._used_bytes + size > self.quota_bytes:
                raise QuotaExceeded(
                    f"run {self._run!r}: no room for {size} bytes: {self._used_bytes} of its quota of "
                    f"{self.quota_bytes} are used",
                    run=self._run,
                    needed_bytes=size,
                    used_bytes=self._used_bytes,
                    quota_bytes=self.quota_bytes,
                )
            self._store.take(size)
            self._used_bytes += size

    def adopt(self, size: int) -> None:
        super().adopt(size)
        self._store.adopt(size)

    def give_back(self, size: int) -> None:
        super().give_back(size)
        self._store.give_back(size)


class RunSpaces:
    """The runs' parts of a store. Thread-safe.

    Attributes:
        store: the whole.

    Args:
        quotas: bytes by run.
        quota_bytes: of every other run; None: as much as there is.
    """

    def __init__(self, store: Space, quotas: Mapping[str, int], quota_bytes: int | None) -> None:
        self.store = store
        self._quotas = dict(quotas)
        self._quota_bytes = quota_bytes
        self._lock = threading.Lock()
        self._runs: dict[str, RunSpace] = {}

    def of(self, run: str) -> RunSpace:
        with self._lock:
            found = self._runs.get(run)
            if found is None:
                quota_bytes = self._quotas.get(run, self._quota_bytes)
                found = self._runs[run] = RunSpace(self.store, run, quota_bytes)
            return found

    def quotas(self) -> dict[str, tuple[int, int]]:
        """Used and quota bytes of the runs that have a quota."""
        with self._lock:
            found = list(self._runs.items())
        return {
            run: (space.used_bytes, space.quota_bytes)
            for run, space in found
            if space.quota_bytes is not None
        }
