"""Chunks of other nodes that this node's readers want: fetched once, kept while there is room.

Eight ranks of a node that read the same chunk ask their own node's shard, which fetches it once from where
it is. Chunks never change, so a copy is as good as the original until the chunk is released.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.errors import ArrowTQError, DeadlineExceeded, InternalError, from_wire
from arrow_tq_schemas.ids import ChunkId

Fetch = Callable[[Sequence[ChunkId]], list[Chunk | None]]
WAIT_S = 60.0
"""How long a reader waits for a chunk that another one is fetching."""


class NodeCache:
    """Whole chunks by id, least recently used ones leave first. Thread-safe.

    Args:
        capacity_bytes: payload kept at most; a larger chunk passes through.
        fetch: gets chunks from where they are, in the order of the ids; None: not there.
    """

    def __init__(self, capacity_bytes: int, fetch: Fetch) -> None:
        self._capacity_bytes = capacity_bytes
        self._fetch = fetch
        self._lock = threading.Lock()
        self._kept: OrderedDict[ChunkId, Chunk] = OrderedDict()
        self._flights: dict[ChunkId, Future[Chunk | None]] = {}
        self._used_bytes = 0
        self._hits = self._misses = self._waits = self._evicted = self._dropped = 0

    def get(self, ids: Iterable[ChunkId]) -> dict[ChunkId, Chunk | None]:
        """The chunks; None for one that is not where it should be.

        Raises:
            Unavailable and whatever else ``fetch`` raised, also to those who waited for another's fetch.
        """
        found: dict[ChunkId, Chunk | None] = {}
        mine: dict[ChunkId, Future[Chunk | None]] = {}
        others: dict[ChunkId, Future[Chunk | None]] = {}
        with self._lock:
            for chunk_id in dict.fromkeys(ids):
                chunk = self._kept.get(chunk_id)
                flight = self._flights.get(chunk_id)
                if chunk is not None:
                    self._kept.move_to_end(chunk_id)
                    self._hits += 1
                    found[chunk_id] = chunk
                elif flight is not None:
                    self._waits += 1
                    others[chunk_id] = flight
                else:
                    self._misses += 1
                    mine[chunk_id] = self._flights[chunk_id] = Future()
        if mine:
            self._fly(mine)
        for chunk_id, flight in (mine | others).items():
            found[chunk_id] = _landed(chunk_id, flight)
        return found

    def drop(self, ids: Iterable[ChunkId]) -> None:
        """Forget released chunks."""
        with self._lock:
            for chunk_id in ids:
                chunk = self._kept.pop(chunk_id, None)
                if chunk is not None:
                    self._used_bytes -= chunk.nbytes
                    self._dropped += 1

    def ids(self) -> list[ChunkId]:
        """What is kept."""
        with self._lock:
            return list(self._kept)

    def counters(self) -> dict[str, float]:
        """Figures by name, as ``/metrics`` shows them."""
        with self._lock:
            return {
                "cache_capacity_bytes": self._capacity_bytes,
                "cache_used_bytes": self._used_bytes,
                "cache_chunks": len(self._kept),
                "cache_hits_total": self._hits,
                "cache_misses_total": self._misses,
                "cache_waits_total": self._waits,
                "cache_evicted_total": self._evicted,
                "cache_dropped_total": self._dropped,
            }

    def _fly(self, flights: dict[ChunkId, Future[Chunk | None]]) -> None:
        """Fetch, keep, and tell those who wait; whatever happens, nobody waits for nothing."""
        wanted = list(flights)
        try:
            chunks = self._fetch(wanted)
        except BaseException as error:
            with self._lock:
                for chunk_id in wanted:
                    del self._flights[chunk_id]
            for flight in flights.values():
                flight.set_exception(error)
            return
        with self._lock:
            for chunk_id, chunk in zip(wanted, chunks, strict=True):
                del self._flights[chunk_id]
                if chunk is not None:
                    self._keep(chunk_id, chunk)
        for chunk_id, chunk in zip(wanted, chunks, strict=True):
            flights[chunk_id].set_result(chunk)

    def _keep(self, chunk_id: ChunkId, chunk: Chunk) -> None:
        if chunk.nbytes > self._capacity_bytes:
            return
        self._kept[chunk_id] = chunk
        self._used_bytes += chunk.nbytes
        while self._used_bytes > self._capacity_bytes:
            _, gone = self._kept.popitem(last=False)
            self._used_bytes -= gone.nbytes
            self._evicted += 1


def _landed(chunk_id: ChunkId, flight: Future[Chunk | None]) -> Chunk | None:
    try:
        return flight.result(WAIT_S)
    except ArrowTQError as error:
        # A copy: several readers may raise it.
        raise from_wire(error.to_wire()) from None
    except TimeoutError:
        raise DeadlineExceeded(f"chunk {chunk_id.hex}: another reader's fetch took over {WAIT_S} s") from None
    except Exception as error:
        raise InternalError(f"chunk {chunk_id.hex}: {type(error).__name__}: {error}") from None
