"""Reads of other nodes' chunks through this node's shard: what every rank of the node wants travels once.

Only the plain case is served here: the chunks are committed, and their shard gives them. Anything else is
``Unavailable``, and whoever asked goes to the shard itself, which says what is the matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from arrow_tq.backend import Read, Rows
from arrow_tq.client.connection import Connection
from arrow_tq.layout.projection import project
from arrow_tq.store.cluster.catalog_link import CatalogLink
from arrow_tq.store.cluster.node_cache import NodeCache
from arrow_tq.store.cluster.shard_link import ShardLink
from arrow_tq.store.cluster.shard_map import Member
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.errors import ArrowTQError, ChunkReleased, MalformedMessage, Unavailable
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import chunk_ids

Connect = Callable[[str], Connection]
SHARDS_ASKED_MAX = 8


class FarReads:
    """Thread-safe.

    Args:
        catalog: says which chunks are committed, and where shards are.
        connect: a connection to a shard's URL, with this server's token.
        capacity_bytes: payload kept at most.
    """

    def __init__(self, catalog: CatalogLink, connect: Connect, capacity_bytes: int) -> None:
        self.cache = NodeCache(capacity_bytes, self._fetch)
        self._catalog = catalog
        self._connect = connect
        self._lock = threading.Lock()
        self._links: dict[int, ShardLink] = {}
        self._asking = ThreadPoolExecutor(SHARDS_ASKED_MAX, thread_name_prefix="arrow-tq-far")

    def read(self, request: Read) -> Iterator[Rows]:
        """One block a span.

        Raises:
            ChunkReleased: at once, naming the ids.
            Unavailable: ask the shard itself.
        """
        wanted = [one.sibling(request.group) for one in chunk_ids(request.spans)]
        self._check(list(dict.fromkeys(wanted)), request.run)
        chunks = self.cache.get(wanted)
        for chunk_id, span in zip(wanted, request.spans, strict=True):
            chunk = chunks[chunk_id]
            if chunk is None or chunk.header.run != request.run or chunk.header.field != request.field.name:
                raise Unavailable(f"chunk {chunk_id.hex} is not given by its shard: ask there")
            yield _rows(chunk, int(span["row"]), int(span["rows"]), request)

    def sweep(self) -> None:
        """Forget what was released; raises ``Unavailable`` where the catalog is away."""
        ids = self.cache.ids()
        if ids:
            states = self._catalog.chunk_states(ids)
            self.cache.drop(one for one, state in zip(ids, states, strict=True) if state != "committed")

    def close(self) -> None:
        """Let go of threads and connections."""
        self._asking.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._links.clear()

    def _check(self, ids: Sequence[ChunkId], run: str) -> None:
        states = self._catalog.chunk_states(ids, run)
        released = [one for one, state in zip(ids, states, strict=True) if state == "released"]
        if released:
            self.cache.drop(released)
            names = [one.hex for one in released]
            raise ChunkReleased(f"chunks {', '.join(names[:5])}: released or discarded", ids=names)
        if any(state != "committed" for state in states):
            raise Unavailable("not every chunk is committed: ask its shard")

    def _fetch(self, ids: Sequence[ChunkId]) -> list[Chunk | None]:
        by_number: dict[int, list[ChunkId]] = {}
        for one in ids:
            by_number.setdefault(one.shard, []).append(one)
        found: dict[ChunkId, Chunk | None] = {}
        for some in self._asking.map(self._fetch_from, by_number, by_number.values()):
            found.update(some)
        return [found[one] for one in ids]

    def _fetch_from(self, number: int, ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk | None]:
        link = self._link(number)
        try:
            # One chunk a message: it is some 8 MiB, and a message has a bound.
            return {one: link.fetch(self._catalog.field, one) for one in ids}
        except ArrowTQError as error:
            # Whatever it says, such as that another process may be the shard: look at the map again.
            self._forget(number)
            raise Unavailable(f"shard {number}: {error.message}") from None

    def _link(self, number: int) -> ShardLink:
        with self._lock:
            link = self._links.get(number)
        if link is not None:
            return link
        entry = self._catalog.cluster_map().shard(number)
        if entry is None or not entry.up or not entry.servers:
            raise Unavailable(f"shard {number} is not up")
        member = Member(
            *(number, entry.epoch, "", "", entry.servers[0], entry.capacity_bytes, entry.used_bytes),
            seen_at=0.0,
        )
        link = ShardLink(member, self._connect(member.server.url), self._forget)
        with self._lock:
            return self._links.setdefault(number, link)

    def _forget(self, number: int) -> None:
        """It moved, or is gone: the next read looks at the map."""
        with self._lock:
            self._links.pop(number, None)


def _rows(chunk: Chunk, row: int, rows: int, request: Read) -> Rows:
    """Some rows of a chunk, with the layers that were asked for; raises ``MalformedMessage`` past its end."""
    if row + rows > len(chunk.values):
        raise MalformedMessage(f"chunk {chunk.header.id}: rows {row} to {row + rows} of {len(chunk.values)}")
    values = chunk.values[row : row + rows]
    if request.layers is not None:
        values = project(values, request.field, request.layers)
    return Rows(values, None if chunk.valid is None else chunk.valid[row : row + rows])
