"""Bundles over Flight: gathered into a few blocks of memory that are used again and again."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from arrow_tq.backend import Backend, Fill, PutHandle
from arrow_tq.client.cluster import Cluster
from arrow_tq_schemas.bundles import BUNDLE_FIELD, checksummed, chunk_header, chunk_id
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.commands import DropChunks, RunInfo
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.ids import IdSeries

CHUNK_BYTES = 3 << 20
"""One message each."""
Memory = npt.NDArray[np.uint8]


class Staging:
    """Blocks of memory that no put is using, up to ``kept_bytes`` of them. Thread-safe."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, nbytes: int) -> Memory:
        """A block of at least that size."""
        with self._lock:
            for index, block in enumerate(self._free):
                if len(block) >= nbytes:
                    return self._free.pop(index)
        return np.empty(max(nbytes, CHUNK_BYTES), np.uint8)

    def give(self, block: Memory) -> None:
        with self._lock:
            if sum(map(len, self._free)) + len(block) <= self._kept_bytes:
                self._free.append(block)


class FlightBundleWriter:
    """Implements ``BundleWriter``: gathers, hashes and hands over, while other blocks travel.

    All chunks of a bundle are on one shard, which its id says.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(
        self,
        backend: Backend,
        cluster: Cluster,
        staging: Staging,
        info: RunInfo,
        staging_bytes_max: int,
        wait_s: float,
    ) -> None:
        self._backend = backend
        self._cluster = cluster
        self._staging = staging
        self._info = info
        self._staging_bytes_max = staging_bytes_max
        self._wait_s = wait_s
        self.bundle_id = IdSeries().next(cluster.place()).hex
        self._written = 0
        self._travelling: deque[tuple[PutHandle, Memory]] = deque()
        self._travelling_bytes = 0

    def write(self, nbytes: int, fill: Fill) -> None:
        while self._travelling and self._travelling_bytes + nbytes > self._staging_bytes_max:
            self._settle()
        block = self._staging.take(nbytes)
        values = block[:nbytes]
        fill(values)
        header = chunk_header(self.bundle_id, self._written, nbytes, self._info.run, self._info.epoch)
        header = checksummed(header, values)
        self._written += 1
        handle = self._cluster.put(BUNDLE_FIELD, [Chunk(header, values, None)])
        self._travelling.append((handle, block))
        self._travelling_bytes += len(block)

    def finish(self) -> None:
        while self._travelling:
            self._settle()

    def abandon(self) -> None:
        # What travels still uses its memory, which is left to it.
        self._travelling.clear()
        ids = [chunk_id(self.bundle_id, index).hex for index in range(self._written)]
        if ids:
            # Where nobody can be told, it is reaped as an orphan.
            with contextlib.suppress(ArrowTQError):
                self._backend.execute(DropChunks(run=self._info.run, chunk_ids=ids))

    def _settle(self) -> None:
        handle, block = self._travelling[0]
        handle.wait(self._wait_s)
        self._travelling.popleft()
        self._travelling_bytes -= len(block)
        self._staging.give(block)
