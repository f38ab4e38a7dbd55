"""Bundles over Flight: written into the server's own files, or gathered into memory that is used again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.backend import Backend, Fill, Header, Placer, PutHandle
from arrow_tq.client.cluster import Cluster
from arrow_tq_schemas.bundles import BUNDLE_FIELD, checksummed, chunk_header, chunk_id
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.commands import DropChunks, RunInfo
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.ids import IdSeries

CHUNK_BYTES = 3 << 20
"""One message each."""
PLACED_BYTES = 6 << 20
"""The same where it is gathered where it stays: each costs a reservation, a header and two threads' turns."""
CLEAN_UP_S = 10.0
"""How long a bundle that failed waits for its chunks before it drops them."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Underway:
    """A chunk that is not stored yet; ``block`` where it is sent from one."""

    handle: PutHandle
    nbytes: int
    block: Memory | None


class FlightBundleWriter:
    """Implements ``BundleWriter``: gathers and hashes a chunk while others are taken over, or travel.

    On the server's machine a chunk is gathered where it stays; otherwise, and where no room is granted, in a
    staging block. All chunks of a bundle are on one shard, which its id says.
    """

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
        self._placer: Placer | None = backend.placer
        self.chunk_bytes = CHUNK_BYTES if self._placer is None else PLACED_BYTES
        self.bundle_id = IdSeries().next(cluster.place()).hex
        self._written: list[int] = []
        self._underway: deque[Underway] = deque()
        self._underway_bytes = 0

    def write(self, index: int, nbytes: int, fill: Fill) -> None:
        while self._underway and self._underway_bytes + nbytes > self._staging_bytes_max:
            self._settle()
        header = chunk_header(self.bundle_id, index, nbytes, self._info.run, self._info.epoch)
        one = self._place(header, fill) or self._send(header, fill)
        self._written.append(index)
        self._underway.append(one)
        self._underway_bytes += one.nbytes

    def finish(self) -> None:
        while self._underway:
            self._settle()

    def abandon(self) -> None:
        # A chunk that arrives after it was dropped would stay.
        until = time.monotonic() + CLEAN_UP_S
        for one in self._underway:
            with contextlib.suppress(ArrowTQError):
                one.handle.wait(max(until - time.monotonic(), 0.0))
        self._underway.clear()
        ids = [chunk_id(self.bundle_id, index).hex for index in self._written]
        if ids:
            # Where nobody can be told, it is reaped as an orphan.
            with contextlib.suppress(ArrowTQError):
                self._backend.execute(DropChunks(run=self._info.run, chunk_ids=ids))

    def _place(self, header: ChunkHeader, fill: Fill) -> Underway | None:
        """Gather it in the server's memory; None where there is no room given away."""
        if self._placer is None:
            return None
        # As long with any other checksum: the values come first, and are hashed where they lie.
        place = self._placer.reserve(
            BUNDLE_FIELD, header.run, header.rows, len(header.to_bytes()), header.chunk_id.shard
        )
        if place is None:
            return None
        try:
            values = place.values[0].view(np.uint8)
            header = checksummed(header, values, fill(values))
            place.publish(
                [Header(header.chunk_id, header.epoch, header.start, header.checksum, header.to_bytes())]
            )
        except BaseException:
            place.abandon()
            raise
        return Underway(self._placer.stored(header.run, [place]), header.rows, None)

    def _send(self, header: ChunkHeader, fill: Fill) -> Underway:
        """By way of a staging block."""
        block = self._staging.take(header.rows)
        values = block[: header.rows]
        header = checksummed(header, values, fill(values))
        handle = self._cluster.put(BUNDLE_FIELD, [Chunk(header, values, None)])
        return Underway(handle, len(block), block)

    def _settle(self) -> None:
        one = self._underway[0]
        one.handle.wait(self._wait_s)
        self._underway.popleft()
        self._underway_bytes -= one.nbytes
        if one.block is not None:
            self._staging.give(one.block)
