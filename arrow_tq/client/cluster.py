"""What a client knows of a cluster: the map of its shards, and a connection to each that it uses."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from arrow_tq.backend import Place, PutHandle, Read, Rows
from arrow_tq.client.connection import Connection
from arrow_tq.client.pending import JoinedPuts
from arrow_tq.client.placement import Placing, boot_id, is_on
from arrow_tq.client.puts import Puts
from arrow_tq.client.samehost.writes import HostPlace
from arrow_tq.client.shard_client import ShardClient, WatchedPut, after, down
from arrow_tq.client.shard_reads import Reader, no_such_shard, unreadable
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.cluster import ClusterMap
from arrow_tq_schemas.errors import ArrowTQError, DeadlineExceeded, Unavailable, Unreachable
from arrow_tq_schemas.fields import Field

MAP_S = 2.0
"""Age at which the map of a cluster is asked again when a new chunk is placed."""
ALONE_S = 30.0
"""The same where there is one shard."""
SUSPECT_S = 5.0
"""How long a shard gets no new chunks after a call to it failed."""
OWN_NUMBER = 0
ASK_FIRST_S, ASK_AGAIN_S = 10.0, 2.0
"""Deadline of asking for the map; where one is known, nobody waits long for a newer one."""
HOLD_OFF_S = 2.0
"""How long a catalog that did not answer is not asked for it again."""
OUT_OF_REACH = (Unavailable, Unreachable, DeadlineExceeded)
"""These types themselves: kinds of them are what a shard says about chunks."""
AskMap = Callable[[float], ClusterMap]
Connect = Callable[[str], Connection]


class Cluster:
    """The shards behind one address, and a ``Placer`` over those on this machine. Thread-safe.

    Args:
        ask_map: gets the map from the catalog, within so many seconds.
        connect: a connection to a URL, not yet connected.
        main: what is open to the address itself, which holds shard 0 where it holds any.
    """

    def __init__(self, ask_map: AskMap, connect: Connect, main: ShardClient) -> None:
        self._ask_map = ask_map
        self._connect = connect
        self._main = main
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._map: ClusterMap | None = None
        self._alone = True
        self._asked_at = self._hold_off_until = float("-inf")
        self._clients: dict[int, ShardClient] = {}
        self._suspects: dict[int, float] = {}
        self._counted: Counter[str] = Counter()
        """By clients of servers that were replaced."""
        self._host = boot_id()
        self._placing = Placing(self._host)

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
        if known is None or fresh:
            return self._asked(known)
        if not self._asking.acquire(blocking=False):
            # One thread asks for all of them.
            return known
        try:
            return self._asked(known)
        finally:
            self._asking.release()

    def _asked(self, known: ClusterMap | None) -> ClusterMap:
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
        """The shard for a new chunk: on this host if one is, by free bytes; for a moment the same.

        What many threads write at a time then goes to one shard, which takes it in few calls, and a commit
        has few shards to ask.

        Raises:
            Unavailable: none is up; retryable.
        """
        known, now = self.map(), time.monotonic()
        if not known.version or (known.shards and self.is_alone):
            return OWN_NUMBER
        number = self._placing.present(known, now)
        if number is not None and self._suspects.get(number, 0.0) < now:
            return number
        able = [one for one in known.shards if one.up and one.takes_new]
        if not able:
            raise Unavailable(f"no shard of the cluster at {self._main.url} is up: try again")
        trusted = [one for one in able if self._suspects.get(one.number, 0.0) < now]
        return self._placing.next(trusted or able, known, now)

    # -- writing -------------------------------------------------------------------------------

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        """Start storing chunks, each on its shard. Raises ``Unreachable`` where there is no such shard."""
        by_number: dict[int, list[Chunk]] = {} if chunks else {OWN_NUMBER: []}
        for chunk in chunks:
            by_number.setdefault(chunk.header.chunk_id.shard, []).append(chunk)
            self._placing.add(chunk.nbytes)
        handles = [self._put(number, field, some) for number, some in by_number.items()]
        return handles[0] if len(handles) == 1 else JoinedPuts(handles)

    def _put(self, number: int, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        if number == OWN_NUMBER:
            return self._main.puts.put(field, chunks)
        client = self._client(number)
        if client is None:
            raise Unreachable(f"put: the cluster has no shard {number}", shard=number)
        if not self._is_up(number) and (where := self.is_down(number)) is not None:
            raise down(number, where)
        return WatchedPut(self, number, client.puts.put(field, chunks))

    def reserve(self, field: Field, run: str, rows: int, header_bytes: int, shard: int) -> Place | None:
        """Room in the memory of a shard of this machine; None where it is elsewhere, or gives none."""
        client = self._main if shard == OWN_NUMBER else self._client(shard)
        if client is None or not client.near or (shard != OWN_NUMBER and not self._is_up(shard)):
            return None
        self._placing.add(rows * field.row_bytes)
        return client.writes.reserve(field, run, rows, header_bytes, shard)

    def stored(self, run: str, places: Sequence[Place]) -> PutHandle:
        """A handle for what was published in these places, each on its shard."""
        return JoinedPuts(
            [WatchedPut(self, one.shard, one.handle) for one in places if isinstance(one, HostPlace)]
        )

    # -- reading -------------------------------------------------------------------------------

    def reader(self, number: int) -> Reader:
        """See ``shard_reads.Shards``."""
        if number == OWN_NUMBER:
            return self._main.read_by_wire
        return lambda request: self._read(number, request)

    def views(self, number: int, request: Read) -> Iterator[Rows] | None:
        """See ``shard_reads.Shards``."""
        client = self._main if number == OWN_NUMBER else self._client(number)
        if client is None or not client.near or not self._is_up(number):
            return None
        try:
            return client.host.read(request)
        except (Unavailable, DeadlineExceeded) as error:
            if type(error) not in OUT_OF_REACH:
                # The shard's own words, such as ChunkPending.
                raise
        # It says so, or answers after all, where its rows are asked for.
        return None

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
            client.close(max(until - time.monotonic(), 0.0))

    def finish(self, timeout_s: float) -> None:
        """Before a fork: end streams and connections; what comes next opens others."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.finish(timeout_s)

    def all_puts(self) -> list[Puts]:
        """Of every shard in use."""
        return [client.puts for client in self._all()]

    def counters(self) -> dict[str, float]:
        """What went around the wire and what did not, over all shards."""
        counted = Counter(self._counted)
        for client in self._all():
            counted.update(client.counters())
        mapped = sum(client.host.mapped_extents for client in self._all())
        return {**counted, "host_mapped_extents": mapped}

    def _is_up(self, number: int) -> bool:
        """As far as is known without asking."""
        entry = self.map().shard(number)
        return entry is not None and entry.up and self._suspects.get(number, 0.0) <= time.monotonic()

    def _all(self) -> list[ShardClient]:
        with self._lock:
            return [self._main, *self._clients.values()]

    def _read(self, number: int, request: Read) -> Iterator[Rows]:
        client = self._client(number)
        if client is None:
            raise no_such_shard(number, request)
        seen = 0
        near = self._near(number)
        if near is not None:
            try:
                for rows in near.read_by_wire(request):
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
            for rows in client.read_by_wire(request):
                seen += len(rows.values)
                yield rows
            return
        except (Unavailable, DeadlineExceeded) as error:
            if type(error) not in OUT_OF_REACH:
                # The shard's own words, such as ChunkPending.
                raise
            failure = error.message
        self.suspect(number)
        moved = self._client(number, fresh=True)
        if moved is None or moved is client:
            raise unreadable(number, client.url, request, failure)
        try:
            yield from moved.read_by_wire(after(request, seen))
        except Unavailable as error:
            raise unreadable(number, moved.url, request, error.message) from None

    def _near(self, number: int) -> ShardClient | None:
        """The shard of this host that keeps other nodes' chunks, where ``number`` is on another one."""
        shards = self.map().shards
        if not self._host or any(one.number == number and is_on(one, self._host) for one in shards):
            return None
        now = time.monotonic()
        for one in shards:
            if one.up and one.caches and is_on(one, self._host) and self._suspects.get(one.number, 0.0) < now:
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
                if client is not None:
                    # Its grants, mappings and streams end by themselves once nobody uses them.
                    self._counted.update(client.counters())
                near, catalog = is_on(entry, self._host), self._main.host.host
                kept = self._main.writes.kept
                client = ShardClient(number, entry.epoch, self._connect(url), near, catalog, kept=kept)
                self._clients[number] = client
            return client


def _has_one_shard(known: ClusterMap) -> bool:
    """Whether the address itself is the only shard; a map without a version is that of no cluster."""
    if not known.version:
        return True
    return len(known.shards) > 0 and all(one.number == OWN_NUMBER for one in known.shards)
