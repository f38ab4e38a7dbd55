"""All shards of a store as the catalog's side sees them: the one in this process, and those far away.

A step commits only with chunks that are stored: before its transaction every shard concerned *confirms*
them, and from then on keeps them until the catalog says what became of them. Inside the transaction
nothing is asked of anybody; what was not confirmed for this very commit is missing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from arrow_tq.backend import Read, Rows
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.shard_reads import read_shards, shard_numbers
from arrow_tq.client.tls import Tls
from arrow_tq.logs import logger
from arrow_tq.store.cluster.outbox import Outbox
from arrow_tq.store.cluster.shard_link import FieldOf, header_of, out_of_reach
from arrow_tq.store.cluster.shard_links import FarPlaces, ShardLinks
from arrow_tq.store.cluster.shard_map import OWN_NUMBER, ShardMap
from arrow_tq.store.holding import Attached, OwnReader, of_run
from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardUsage
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.cluster import Beat, ClusterMap, ConfirmedChunk, JoinCluster, Joined, LeaveCluster, News
from arrow_tq_schemas.errors import ArrowTQError, Unavailable
from arrow_tq_schemas.ids import ChunkId

RELEASE_S = 1.0
"""How long a release waits for the shards to let go; they do so afterwards in any case."""


@dataclass(slots=True)
class _Held:
    """A far chunk that a commit under way is about to attach."""

    header: ChunkHeader | None = None
    """None: its shard does not have it."""
    problem: Unavailable | None = None
    """Its shard could not be asked."""
    commits: int = 0
    """How many commits under way name it."""
    pinned: bool = False
    doomed: bool = False
    """It was on its way out when the commit began: nobody knows which came first."""


class ShardSet:
    """Implements ``ChunkHolder`` over this process's shard and the far ones. Thread-safe."""

    def __init__(
        self,
        own: Shard,
        holds_own: bool,
        shard_map: ShardMap,
        token: str | None,
        tls: Tls | None,
        options: ClientOptions,
    ) -> None:
        self.map = shard_map
        self.holds_own = holds_own
        self._own = own
        self._links = ShardLinks(shard_map, token, tls, options)
        self.link = self._links.link
        self.far_stats = self._links.stats
        self.close = self._links.close
        self._outbox = Outbox(shard_map.catalog)
        self._lock = threading.Lock()
        self._held: dict[ChunkId, _Held] = {}
        self._dropping: set[ChunkId] = set()
        self._fields: FieldOf | None = None
        self._log = logger("arrow_tq.cluster")

    def use_fields(self, fields: FieldOf) -> None:
        """Who knows the declared fields."""
        self._fields = fields

    def cluster_map(self) -> ClusterMap:
        """The map as it is now."""
        return self.map.map()

    def gauges(self) -> dict[str, float]:
        """Figures of each far shard by name."""
        values: dict[str, float] = {}
        for member in self.map.members():
            label = f'{{shard="{member.number}"}}'
            values[f"shard_up{label}"] = float(self.map.is_up(member.number))
            values[f"shard_used_bytes{label}"] = member.used_bytes
            values[f"shard_capacity_bytes{label}"] = member.capacity_bytes
        return values

    # -- the shards' calls ---------------------------------------------------------------------

    def join(self, command: JoinCluster) -> Joined:
        """A shard is there; see ``ShardMap.join``."""
        joined = self.map.join(command)
        self._outbox.joined(joined.number)
        return joined

    def beat(self, command: Beat) -> News:
        """A shard is still there; what it has to know."""
        self.map.beat(command)
        return self._outbox.take(command.number, command.catalog, command.done, command.wait_s)

    def leave(self, command: LeaveCluster) -> None:
        """A shard ends in order; see ``ShardMap.leave``."""
        self.map.leave(command)

    # -- commits -------------------------------------------------------------------------------

    @contextmanager
    def confirming(self, attached: Sequence[Attached]) -> Iterator[None]:
        """Around a commit: have the far chunks that it attaches confirmed, and held."""
        # Without members no far chunk can be held, and what names one is missing.
        wanted = _far_chunks(attached) if self.map.has_members else []
        if not wanted:
            yield
            return
        ids = [one for _, _, chunks in wanted for one in chunks]
        with self._lock:
            # Held before they are asked for: from here on nobody frees them.
            for chunk_id in ids:
                held = self._held.setdefault(chunk_id, _Held())
                held.commits += 1
                held.doomed = held.doomed or chunk_id in self._dropping
        try:
            for _ in self._links.ask_all(self._confirm, wanted):
                pass
            yield
        finally:
            self._settle(ids)

    def held(self, ids: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of the ids that a commit under way is about to attach."""
        with self._lock:
            return {one for one in ids if one in self._held}

    def _confirm(self, wanted: tuple[int, str, list[ChunkId]]) -> None:
        number, run, ids = wanted
        problem: Unavailable | None = None
        found: list[ConfirmedChunk | None] = [None] * len(ids)
        try:
            link = self.link(number)
            told = link.confirm(run, ids)
            if not self.map.is_current(link.member):
                # Its answer was on its way while another process became the shard.
                raise out_of_reach(number, link.member.server.url, "it was replaced")
            found = told.chunks
            if told.used_bytes is not None:
                self.map.fills(link.member, told.used_bytes)
        except Unavailable as error:
            problem = error
        except ArrowTQError as error:
            # No such shard, or one that holds another epoch of it: nothing is stored there.
            self._log.warning("shard did not confirm", number=number, error=error.message)
        with self._lock:
            for chunk_id, one in zip(ids, found, strict=True):
                held = self._held[chunk_id]
                held.header = None if one is None else header_of(chunk_id, one)
                held.problem = problem

    def _settle(self, ids: Sequence[ChunkId]) -> None:
        """The commits are over: what was attached is news for its shard."""
        attached: dict[int, list[ChunkId]] = {}
        with self._lock:
            for chunk_id in ids:
                one = self._held[chunk_id]
                one.commits -= 1
                if not one.commits:
                    del self._held[chunk_id]
                    if one.pinned:
                        attached.setdefault(chunk_id.shard, []).append(chunk_id)
        for number, chunks in attached.items():
            self._outbox.add(number, "attached", chunks)

    # -- what the catalog's side asks ----------------------------------------------------------

    def header(self, chunk_id: ChunkId) -> ChunkHeader | None:
        """Of a far chunk: as confirmed for a commit under way. Raises ``Unavailable`` naming its shard."""
        if chunk_id.shard == OWN_NUMBER:
            return self._own.header(chunk_id)
        with self._lock:
            one = self._held.get(chunk_id)
        if one is None:
            return None
        if one.problem is not None:
            raise one.problem
        return None if one.doomed else one.header

    def holds(self, chunk_id: ChunkId) -> bool:
        """Of a far chunk: whether there is such a shard. Whether it still has the chunk, a read will tell."""
        if chunk_id.shard == OWN_NUMBER:
            return self._own.holds(chunk_id)
        return self.map.member(chunk_id.shard) is not None

    def sha256(self, ids: Sequence[ChunkId]) -> str:
        """Raises ``Unavailable`` naming the shard out of reach."""
        numbers = {one.shard for one in ids}
        if numbers <= {OWN_NUMBER}:
            return self._own.sha256(ids)
        if len(numbers) == 1:
            return self.link(numbers.pop()).digest(ids)
        digest = hashlib.sha256()
        for chunk_id in ids:
            chunk = self.get(chunk_id)
            if chunk is not None:
                digest.update(chunk.values.data)
        return digest.hexdigest()

    def pin(self, ids: Sequence[ChunkId]) -> list[ChunkId]:
        """Called by the catalog's writer: asks nobody."""
        own = [one for one in ids if one.shard == OWN_NUMBER]
        far = [one for one in ids if one.shard != OWN_NUMBER]
        with self._lock:
            found = {one: self._held.get(one) for one in far}
            missing = [
                one for one, held in found.items() if held is None or held.doomed or held.header is None
            ]
            if missing:
                return missing
            missing = self._own.pin(own) if own else []
            if not missing:
                for held in found.values():
                    assert held is not None
                    held.pinned = True
            return missing

    def unpin(self, ids: Sequence[ChunkId]) -> None:
        self._own.unpin([one for one in ids if one.shard == OWN_NUMBER])
        with self._lock:
            for chunk_id in ids:
                held = self._held.get(chunk_id)
                if held is not None:
                    held.pinned = False

    def is_pinned(self, chunk_id: ChunkId) -> bool:
        """Of a far chunk: whether the commit under way attached it."""
        if chunk_id.shard == OWN_NUMBER:
            return self._own.is_pinned(chunk_id)
        with self._lock:
            held = self._held.get(chunk_id)
            return held is not None and held.pinned

    def get(self, chunk_id: ChunkId) -> Chunk | None:
        if chunk_id.shard == OWN_NUMBER:
            return self._own.get(chunk_id)
        if self.map.member(chunk_id.shard) is None or self._fields is None:
            return None
        return self.link(chunk_id.shard).fetch(self._fields, chunk_id)

    def drop(self, ids: Iterable[ChunkId]) -> None:
        """Released: the far ones are news for their shards, which those that are up deal with at once."""
        by_number = _by_number(ids)
        self._own.drop(by_number.pop(OWN_NUMBER, []))
        told = {number: self._outbox.add(number, "released", chunks) for number, chunks in by_number.items()}
        up = {number: last for number, last in told.items() if self.map.is_up(number)}
        if up and not self._outbox.wait_done(up, RELEASE_S):
            self._log.info("shards are slow to let go", shards=sorted(up))

    def free(self, run: str, ids: Iterable[ChunkId]) -> int:
        """Far ones too, but for those that a commit under way is about to attach."""
        by_number = _by_number(ids)
        count = self._own.drop_unpinned(of_run(self._own, run, by_number.pop(OWN_NUMBER, [])))
        with self._lock:
            far = {
                number: [one for one in chunks if one not in self._held]
                for number, chunks in by_number.items()
            }
            going = {one for chunks in far.values() for one in chunks}
            # A commit that has them confirmed meanwhile finds them here, and does without.
            self._dropping |= going
        try:
            return count + self._links.tend_all(far, run, keep=False)
        finally:
            with self._lock:
                self._dropping -= going

    def keep(self, run: str, ids: Iterable[ChunkId]) -> int:
        by_number = _by_number(ids)
        count = self._own.keep_unpinned(of_run(self._own, run, by_number.pop(OWN_NUMBER, [])))
        return count + self._links.tend_all(by_number, run, keep=True)

    def read(self, request: Read, own: OwnReader) -> Iterator[Rows]:
        """Through this process: for callers that do not go to the shards themselves."""
        if not shard_numbers(request.spans).any():
            return own(request)
        return read_shards(FarPlaces(self._links, own), request)

    def usage(self) -> ShardUsage:
        """This process's shard, where it holds any, and the far ones that are up."""
        used, capacity = self.level()
        return replace(self._own.usage(), used_bytes=used, capacity_bytes=capacity)

    def level(self) -> tuple[int, int]:
        """As in ``usage``."""
        entries = [one for one in self.map.map().shards if one.number != OWN_NUMBER and one.up]
        used = sum(one.used_bytes for one in entries)
        capacity = sum(one.capacity_bytes for one in entries)
        if self.holds_own:
            own_used, own_capacity = self._own.level()
            used, capacity = used + own_used, capacity + own_capacity
        return used, max(capacity, 1)

    def make_room(self) -> bool:
        """Here alone: far shards look after themselves."""
        return self._own.make_room()


def _by_number(ids: Iterable[ChunkId]) -> dict[int, list[ChunkId]]:
    found: dict[int, list[ChunkId]] = {}
    for chunk_id in ids:
        found.setdefault(chunk_id.shard, []).append(chunk_id)
    return found


def _far_chunks(attached: Sequence[Attached]) -> list[tuple[int, str, list[ChunkId]]]:
    """Shard number, run, and what is attached there: every layer group."""
    found: dict[tuple[int, str], list[ChunkId]] = {}
    for run, receipt in attached:
        for chunk in receipt.chunks:
            first = chunk.chunk_id
            if first.shard != OWN_NUMBER:
                siblings = [first.sibling(group) for group in range(chunk.groups)]
                found.setdefault((first.shard, run), []).extend(siblings)
    return [(number, run, list(dict.fromkeys(ids))) for (number, run), ids in found.items()]
