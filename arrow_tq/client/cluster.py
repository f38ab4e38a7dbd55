"""What a client knows of a cluster: the map of its shards, and a connection to each that it uses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from arrow_tq.backend import PutHandle, Read, Rows
from arrow_tq.client.connection import Connection
from arrow_tq.client.pending import JoinedPuts, PendingPut
from arrow_tq.client.puts import Puts
from arrow_tq.client.reads import read
from arrow_tq.client.shard_reads import Reader, no_such_shard, unreadable
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.cluster import ClusterMap, ShardEntry
from arrow_tq_schemas.errors import ArrowTQError, DeadlineExceeded, Unavailable, Unreachable
from arrow_tq_schemas.fields import Field

MAP_S = 2.0
"""Age at which the map of a cluster is asked again when a new chunk is placed."""
ALONE_S = 30.0
"""The same where there is one shard."""
SUSPECT_S = 5.0
"""How long a shard gets no new chunks after a call to it failed."""
STALL_S = 2.0
OWN_NUMBER = 0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ASK_FIRST_S, ASK_AGAIN_S = 10.0, 2.0
"""Deadline of asking for the map; where one is known, nobody waits long for a newer one."""
HOLD_OFF_S = 2.0
"""How long a catalog that did not answer is not asked for it again."""
AskMap = Callable[[float], ClusterMap]
Connect = Callable[[str], Connection]


class ShardClient:
    """Connection and put streams of one server of a shard."""

    def __init__(self, entry: ShardEntry, connection: Connection) -> None:
        self.number = entry.number
        self.epoch = entry.epoch
        self.url = connection.url
        self.connection = connection
        self.puts = Puts(connection)


class Cluster:
    """The shards behind one address. Thread-safe.

    Args:
        ask_map: gets the map from the catalog, within so many seconds.
        connect: a connection to a URL, not yet connected.
        main: connection and puts of the address itself, which holds shard 0 where it holds any.
    """

    def __init__(self, ask_map: AskMap, connect: Connect, main: Connection, main_puts: Puts) -> None:
        self._ask_map = ask_map
        self._connect = connect
        self._main = main
        self._main_puts = main_puts
        self._lock = threading.Lock()
        self._map: ClusterMap | None = None
        self._alone = True
        self._asked_at = self._hold_off_until = float("-inf")
        self._clients: dict[int, ShardClient] = {}
        self._suspects: dict[int, float] = {}
        self._host = boot_id()

    @property
    def is_alone(self) -> bool:
        """Whether the address itself is the only shard, as far as is known."""
        return self._alone

    def map(self, fresh: bool = False) -> ClusterMap:
        """The map, asked anew where it is old or ``fresh``; an older one where nobody answers."""
        age_s = time.monotonic() - self._asked_at
        known = self._map
        if known is not None and not fresh and age_s < (ALONE_S if self.is_alone else MAP_S):
            return known
        if known is not None and time.monotonic() < self._hold_off_until:
            return known
        try:
            found = self._ask_map(ASK_FIRST_S if known is None else ASK_AGAIN_S)
        except (Unavailable, DeadlineExceeded):
            if known is None:
                raise
            # The catalog is away: what was true goes on being true until it is back.
            self._hold_off_until = time.monotonic() + HOLD_OFF_S
            return known
        except ArrowTQError:
            # A server that knows no clusters.
            found = known or ClusterMap(version=0, catalog="0" * 32, lease_s=0, shards=[])
        with self._lock:
            self._map, self._asked_at = found, time.monotonic()
            # Kept, as each put asks for it.
            self._alone = _has_one_shard(found)
        return found

    def look(self) -> None:
        """Ask for the map once, so that it is known whether there is more than one server to wait for."""
        try:
            self.map()
        except ArrowTQError:
            # Whoever needs it asks again, and is told.
            return

    def place(self) -> int:
        """The shard for a new chunk: one on this host if there is any, by free bytes.

        Raises:
            Unavailable: none is up; retryable.
        """
        known = self.map()
        shards = known.shards
        if not known.version or (shards and self.is_alone):
            return OWN_NUMBER
        now = time.monotonic()
        able = [one for one in shards if one.up and one.takes_new]
        if not able:
            raise Unavailable(f"no shard of the cluster at {self._main.url} is up: try again")
        trusted = [one for one in able if self._suspects.get(one.number, 0.0) < now]
        return choose(trusted or able, self._host, random.random())

    # -- writing -------------------------------------------------------------------------------

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        """Start storing chunks, each on its shard. Raises ``Unreachable`` where there is no such shard."""
        by_number: dict[int, list[Chunk]] = {} if chunks else {OWN_NUMBER: []}
        for chunk in chunks:
            by_number.setdefault(chunk.header.chunk_id.shard, []).append(chunk)
        handles = [self._put(number, field, some) for number, some in by_number.items()]
        return handles[0] if len(handles) == 1 else JoinedPuts(handles)

    def _put(self, number: int, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        if number == OWN_NUMBER:
            return self._main_puts.put(field, chunks)
        client = self._client(number)
        if client is None:
            raise Unreachable(f"put: the cluster has no shard {number}", shard=number)
        return WatchedPut(self, number, client.puts.put(field, chunks))

    # -- reading -------------------------------------------------------------------------------

    def reader(self, number: int) -> Reader:
        """See ``shard_reads.Shards``."""
        if number == OWN_NUMBER:
            return lambda request: read(self._main, request)
        return lambda request: self._read(number, request)

    def is_down(self, number: int) -> str | None:
        """See ``shard_reads.Shards``."""
        entry = self.map(fresh=True).shard(number)
        if entry is None or entry.up:
            return None
        self.suspect(number)
        return entry.servers[0].url

    def suspect(self, number: int) -> None:
        """A call to it failed: no new chunks go there for a while."""
        self._suspects[number] = time.monotonic() + SUSPECT_S

    def close(self, timeout_s: float) -> None:
        """End put streams and connections."""
        until = time.monotonic() + timeout_s
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.puts.close(max(until - time.monotonic(), 0.0))
            client.connection.renew()

    def finish(self, timeout_s: float) -> None:
        """Before a fork: end streams and connections; what comes next opens others."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.puts.finish(timeout_s)
            client.connection.renew()

    def all_puts(self) -> list[Puts]:
        """Of every shard in use."""
        with self._lock:
            return [self._main_puts, *(client.puts for client in self._clients.values())]

    def _read(self, number: int, request: Read) -> Iterator[Rows]:
        client = self._client(number)
        if client is None:
            raise no_such_shard(number, request)
        seen = 0
        near = self._near(number)
        if near is not None:
            try:
                for rows in read(near.connection, request):
                    seen += len(rows.values)
                    yield rows
                return
            except (Unavailable, DeadlineExceeded) as error:
                if isinstance(error, Unreachable | DeadlineExceeded):
                    self.suspect(near.number)
        yield from self._read_there(number, client, after(request, seen))

    def _read_there(self, number: int, client: ShardClient, request: Read) -> Iterator[Rows]:
        """From the shard itself; once more where it moved meanwhile."""
        seen = 0
        try:
            for rows in read(client.connection, request):
                seen += len(rows.values)
                yield rows
            return
        except (Unavailable, DeadlineExceeded) as error:
            if type(error) not in (Unavailable, Unreachable, DeadlineExceeded):
                # The shard's own words, such as ChunkPending.
                raise
            failure = error.message
        self.suspect(number)
        moved = self._client(number, fresh=True)
        if moved is None or moved is client:
            raise unreadable(number, client.url, request, failure)
        try:
            yield from read(moved.connection, after(request, seen))
        except Unavailable as error:
            raise unreadable(number, moved.url, request, error.message) from None

    def _near(self, number: int) -> ShardClient | None:
        """The shard of this host that keeps other nodes' chunks, where ``number`` is on another one."""
        shards = self.map().shards
        if not self._host or any(one.number == number and _is_on(one, self._host) for one in shards):
            return None
        now = time.monotonic()
        for one in shards:
            if (
                one.up
                and one.caches
                and _is_on(one, self._host)
                and self._suspects.get(one.number, 0.0) < now
            ):
                return self._client(one.number)
        return None

    def _client(self, number: int, fresh: bool = False) -> ShardClient | None:
        """The client of a shard's present server; None: there is no such shard."""
        entry = self.map(fresh).shard(number)
        if entry is None and not fresh:
            entry = self.map(fresh=True).shard(number)
        if entry is None or not entry.servers:
            return None
        url = entry.servers[0].url
        with self._lock:
            client = self._clients.get(number)
            if client is None or (client.epoch, client.url) != (entry.epoch, url):
                client = self._clients[number] = ShardClient(entry, self._connect(url))
            return client


class WatchedPut:
    """Implements ``PutHandle``: waits no longer for a shard than it is up."""

    def __init__(self, cluster: Cluster, number: int, handle: PendingPut) -> None:
        self._cluster = cluster
        self._number = number
        self._handle = handle

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every chunk is stored.

        Raises:
            Unreachable: the shard is down; names it. Whether its chunks are stored is not known.
        """
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            try:
                self._handle.wait(max(0.0, min(left_s, STALL_S)))
            except DeadlineExceeded:
                where = self._cluster.is_down(self._number)
                if where is not None:
                    raise Unreachable(
                        f"put: shard {self._number} at {where} is down", shard=self._number, url=where
                    ) from None
                if left_s <= STALL_S:
                    raise
            except Unreachable:
                self._cluster.suspect(self._number)
                raise
            else:
                return


def choose(shards: Sequence[ShardEntry], host: str, chance: float) -> int:
    """Of these shards one on ``host`` if there is any; the more bytes are free there, the likelier.

    Args:
        shards: at least one.
        host: boot id of the writer's machine.
        chance: from 0 to 1: which of them, by their shares of the free bytes.
    """
    near = [one for one in shards if _is_on(one, host)]
    near = [one for one in near if _free(one)] or near
    pool = near if any(_free(one) for one in near) else list(shards)
    free = [_free(one) for one in pool]
    left = chance * sum(free)
    for one, size in zip(pool, free, strict=True):
        left -= size
        if left < 0:
            return one.number
    return pool[-1].number


def boot_id() -> str:
    """This machine since it was started: equal where memory can be shared."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _free(entry: ShardEntry) -> int:
    return max(entry.capacity_bytes - entry.used_bytes, 0)


def _is_on(entry: ShardEntry, host: str) -> bool:
    return any(server.host == host for server in entry.servers)


def after(request: Read, rows: int) -> Read:
    """What is left of a request after its first rows."""
    if not rows:
        return request
    ends = np.cumsum(request.spans["rows"], dtype=np.int64)
    first = int(np.searchsorted(ends, rows, side="right"))
    spans = request.spans[first:].copy()
    if len(spans):
        done = rows - (int(ends[first - 1]) if first else 0)
        for name in ("start", "row"):
            spans[name][0] += done
        spans["rows"][0] -= done
    return replace(request, spans=spans)


def _has_one_shard(known: ClusterMap) -> bool:
    """Whether the address itself is the only shard; a map without a version is that of no cluster."""
    if not known.version:
        return True
    return len(known.shards) > 0 and all(one.number == OWN_NUMBER for one in known.shards)
