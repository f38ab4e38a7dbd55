"""Connections to the far shards, and what several of them are asked at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from arrow_tq.backend import Read, Rows
from arrow_tq.client.connection import Connection
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.shard_reads import Reader, no_such_shard, unreadable
from arrow_tq.client.tls import Tls
from arrow_tq.logs import logger
from arrow_tq.store.cluster.shard_link import ShardLink, out_of_reach
from arrow_tq.store.cluster.shard_map import OWN_NUMBER, ShardMap
from arrow_tq.store.holding import OwnReader
from arrow_tq_schemas.errors import ChunkLost, Unavailable
from arrow_tq_schemas.ids import ChunkId

LINKS_MAX = 64
"""Shards asked at the same time at most."""
_COUNTED_HERE = frozenset({"capacity_bytes", "used_bytes", "joined"})
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class ShardLinks:
    """One connection a far shard, made when it is first asked. Thread-safe."""

    def __init__(
        self, shard_map: ShardMap, token: str | None, tls: Tls | None, options: ClientOptions
    ) -> None:
        self.map = shard_map
        self._token = token
        self._tls = tls
        self._options = options
        self._lock = threading.Lock()
        self._links: dict[int, ShardLink] = {}
        self._asking = ThreadPoolExecutor(LINKS_MAX, thread_name_prefix="arrow-tq-shards")
        self._log = logger("arrow_tq.cluster")

    def link(self, number: int) -> ShardLink:
        """Raises ``Unavailable`` where the shard is down, ``ChunkLost`` where it never was."""
        member = self.map.member(number)
        if member is None:
            raise ChunkLost(f"there is no shard {number}", shard=number)
        if not self.map.is_up(number):
            raise out_of_reach(number, member.server.url, "its lease ran out")
        with self._lock:
            link = self._links.get(number)
            if link is None or link.member.epoch != member.epoch:
                connection = Connection(member.server.url, self._token, self._options, self._tls)
                link = self._links[number] = ShardLink(member, connection, self.map.lost_touch)
            return link

    def ask_all(self, ask: Callable[[Asked], Answer], asked: Iterable[Asked]) -> Iterator[Answer]:
        """Ask about each at the same time; answers in their order."""
        wanted = list(asked)
        # One is asked from here: most commits concern one shard, and a thread costs as much as the call.
        return map(ask, wanted) if len(wanted) == 1 else self._asking.map(ask, wanted)

    def stats(self) -> dict[str, float]:
        """What the far shards that are up count themselves, added up by name; asks each of them."""
        values: dict[str, float] = {}
        up = [one.number for one in self.map.members() if self.map.is_up(one.number)]
        for found in self.ask_all(self._stats, up):
            for name, value in found.items():
                if name not in _COUNTED_HERE:
                    values[name] = values.get(name, 0.0) + value
        return values

    def tend_all(self, far: dict[int, list[ChunkId]], run: str, keep: bool) -> int:
        """Keep or free unattached chunks by shard number; gives how many those up had of them."""
        return sum(self.ask_all(lambda number: self._tend(number, far[number], run, keep), far))

    def close(self) -> None:
        """Let go of threads and connections."""
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._links.clear()

    def _stats(self, number: int) -> dict[str, float]:
        try:
            return self.link(number).stats()
        except Unavailable:
            return {}

    def _tend(self, number: int, chunks: list[ChunkId], run: str, keep: bool) -> int:
        if not chunks or self.map.member(number) is None:
            return 0
        try:
            return self.link(number).tend(run, chunks, keep)
        except Unavailable as error:
            # What is not freed now is reaped by its shard.
            self._log.info("shard not tended", number=number, error=error.message)
            return 0


class FarPlaces:
    """Implements ``shard_reads.Shards`` for reads through the catalog's process."""

    def __init__(self, links: ShardLinks, own: OwnReader) -> None:
        self._links = links
        self._own = own

    def reader(self, number: int) -> Reader:
        return self._own if number == OWN_NUMBER else lambda request: self._far(number, request)

    def views(self, number: int, request: Read) -> Iterator[Rows] | None:
        """This process's own shard is read in place; of others nothing is mapped here."""
        return self._own(request) if number == OWN_NUMBER else None

    def is_down(self, number: int) -> str | None:
        member = self._links.map.member(number)
        return None if member is None or self._links.map.is_up(number) else member.server.url

    def _far(self, number: int, request: Read) -> Iterator[Rows]:
        member = self._links.map.member(number)
        if member is None:
            raise no_such_shard(number, request)
        try:
            yield from self._links.link(number).read(request)
        except Unavailable as error:
            raise unreadable(number, member.server.url, request, error.message) from None
