"""Bundles in this process: written straight into extents, published, leased, deleted."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque

import numpy as np

from arrow_tq.backend import Fill, written
from arrow_tq.store.catalog import Catalog
from arrow_tq.store.holding import Attached, ChunkHolder
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.bundles import BUNDLE_FIELD, chunk_header, chunk_id
from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.commands import (
    BundleInfo,
    CloseBundle,
    Command,
    CommitBundle,
    DeleteBundle,
    Done,
    OpenBundle,
    Reply,
    RunInfo,
)
from arrow_tq_schemas.errors import Busy, ChunkLost, ChunkPending, Unavailable
from arrow_tq_schemas.ids import ChunkId, IdSeries
from arrow_tq_schemas.receipts import stored_chunk, trusted_receipt

CHUNK_BYTES = 32 << 20
LEASES_MAX = 100_000


class Leases:
    """Who reads which bundle, until when. In memory: a restart of the store ends them all. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, tuple[str, float]] = {}
        """By lease, its bundle and when it expires."""
        self._ended: deque[str] = deque()
        """Ended by finalizers, which must take no lock."""
        self.expired = 0

    def take(self, bundle_id: str, lease_s: float) -> str:
        """Raises ``Busy`` where there are too many."""
        lease_id = secrets.token_hex(8)
        with self._lock:
            self._settle()
            if len(self._leases) >= LEASES_MAX:
                raise Busy(f"bundle {bundle_id}: {LEASES_MAX} leases are open already")
            self._leases[lease_id] = bundle_id, time.monotonic() + lease_s
        return lease_id

    def end_soon(self, lease_id: str) -> None:
        """End a lease; safe in a finalizer."""
        self._ended.append(lease_id)

    def end(self, lease_ids: list[str]) -> int:
        """End leases; says how many there were."""
        with self._lock:
            return sum(self._leases.pop(lease_id, None) is not None for lease_id in lease_ids)

    def on(self, bundle_id: str) -> int:
        """How many leases a bundle has."""
        with self._lock:
            self._settle()
            return sum(one == bundle_id for one, _ in self._leases.values())

    def held(self) -> set[str]:
        """The bundles that somebody reads."""
        with self._lock:
            self._settle()
            return {bundle_id for bundle_id, _ in self._leases.values()}

    @property
    def open(self) -> int:
        with self._lock:
            self._settle()
            return len(self._leases)

    def _settle(self) -> None:
        while self._ended:
            self._leases.pop(self._ended.popleft(), None)
        now = time.monotonic()
        late = [lease_id for lease_id, (_, until) in self._leases.items() if until <= now]
        for lease_id in late:
            del self._leases[lease_id]
        self.expired += len(late)


class EngineBundles:
    """Answers the bundle commands of an engine.

    Args:
        shard: where bundles of this process are written.
        chunks: chunks wherever they are.
        catalog: which bundles there are.
    """

    def __init__(self, shard: Shard, chunks: ChunkHolder, catalog: Catalog) -> None:
        self._shard = shard
        self._chunks = chunks
        self._catalog = catalog
        self.leases = Leases()

    def execute(self, command: Command) -> Reply | None:
        """The answer to a bundle command, None for others."""
        if isinstance(command, CommitBundle):
            return self._commit(command)
        if isinstance(command, OpenBundle):
            return self._open(command)
        if isinstance(command, CloseBundle):
            return Reply(body=Done(count=self.leases.end(list(command.lease_ids))))
        if isinstance(command, DeleteBundle):
            return self._delete(command)
        return None

    def writer(self, info: RunInfo) -> EngineBundleWriter:
        return EngineBundleWriter(self._shard, info)

    def tend(self) -> None:
        """Free deleted bundles whose readers are gone."""
        deleting = self._catalog.bundles_deleting()
        if not deleting:
            return
        held = self.leases.held()
        free = [bundle_id for bundle_id in deleting if bundle_id not in held]
        if free:
            self._catalog.release_bundles(free)

    def stats(self) -> dict[str, float]:
        values: dict[str, float] = {
            "bundle_leases": self.leases.open,
            "bundle_leases_expired_total": self.leases.expired,
        }
        for run, (count, size) in self._catalog.bundle_usage().items():
            values[f'bundles{{run="{run}"}}'] = count
            values[f'bundle_bytes{{run="{run}"}}'] = size
        return values

    def _commit(self, command: CommitBundle) -> Reply:
        with self._chunks.confirming(_attached(command)):
            self._check_stored(command)
            return self._catalog.execute(command)

    def _check_stored(self, command: CommitBundle) -> None:
        for index in range(command.chunks):
            one = chunk_id(command.bundle_id, index)
            header = self._chunks.header(one)
            if header is None or (header.run, header.field) != (command.run, BUNDLE_FIELD.name):
                raise ChunkLost(
                    f"bundle {command.bundle_id}: chunk {index} of {command.chunks} is not stored in run "
                    f"{command.run!r}",
                    ids=[one.hex],
                )

    def _open(self, command: OpenBundle) -> Reply:
        # The lease comes first: a delete after it waits, and one before it is seen.
        lease_id = self.leases.take(command.bundle_id, command.lease_s)
        try:
            row = self._catalog.bundle(command.run, command.bundle_id)
            structure = self._structure(ChunkId.from_hex(command.bundle_id))
        except BaseException:
            self.leases.end([lease_id])
            raise
        info = BundleInfo(
            run=command.run,
            bundle_id=row.bundle_id,
            chunks=row.chunks,
            rows=row.rows,
            bytes=row.bytes,
            metadata=row.metadata,
            lease_id=lease_id,
        )
        return Reply(body=info, blobs=[structure])

    def _structure(self, first: ChunkId) -> bytes:
        """Chunk 0; raises ``ChunkPending`` where its shard is away, ``ChunkLost`` where it is gone."""
        try:
            chunk = self._chunks.get(first)
        except Unavailable as error:
            message = f"bundle {first.hex}: {error.message}"
            raise ChunkPending(message, **{**error.details, "ids": [first.hex]}) from None
        if chunk is None:
            raise ChunkLost(
                f"bundle {first.hex}: its structure is not stored any more, or corrupt", ids=[first.hex]
            )
        return chunk.values.tobytes()

    def _delete(self, command: DeleteBundle) -> Reply:
        self._catalog.execute(command)
        readers = self.leases.on(command.bundle_id)
        if not readers:
            self._catalog.release_bundles([command.bundle_id])
        return Reply(body=Done(count=readers))


class EngineBundleWriter:
    """Implements ``BundleWriter``: values go from where they are into the extent, once."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, shard: Shard, info: RunInfo) -> None:
        self._shard = shard
        self._info = info
        self.bundle_id = IdSeries().next(0).hex
        self._written: list[int] = []

    def write(self, index: int, nbytes: int, fill: Fill) -> None:
        header = chunk_header(self.bundle_id, index, nbytes, self._info.run, self._info.epoch)
        self._shard.fill(BUNDLE_FIELD, header, fill, self._info.durability)
        self._written.append(index)

    def finish(self) -> None:
        if self._info.durability == "disk":
            self._shard.sync(self._info.run)

    def abandon(self) -> None:
        self._shard.drop_unpinned([chunk_id(self.bundle_id, index) for index in self._written])


def _attached(command: CommitBundle) -> list[Attached]:
    """What publishing attaches on a shard far away; what is in this process is looked up in it."""
    first = ChunkId.from_hex(command.bundle_id)
    if not first.shard:
        return []
    ids = [chunk_id(command.bundle_id, index).hex for index in range(command.chunks)]
    chunks = [stored_chunk(one, index, 1, 1, 1) for index, one in enumerate(ids)]
    return [
        (
            command.run,
            trusted_receipt(command.run, command.epoch, BUNDLE_FIELD.name, 0, len(chunks), chunks),
        )
    ]


def receive_bundle_chunk(shard: Shard, header: ChunkHeader, values: np.ndarray, info: RunInfo) -> None:
    """Store a bundle's chunk that came from the network, checked already."""
    shard.fill(BUNDLE_FIELD, header, lambda out: written(out, values), info.durability)
