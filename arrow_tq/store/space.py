"""How many payload bytes a shard may allocate, and how many it has."""

from __future__ import annotations

import threading

from arrow_tq_schemas.errors import StoreFull


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
