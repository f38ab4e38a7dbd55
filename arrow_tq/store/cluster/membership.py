"""A shard's place in its cluster: it joins, beats, takes news, and knows when it is no longer the one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from arrow_tq.logs import logger
from arrow_tq.store.cluster.catalog_link import CatalogLink
from arrow_tq.store.cluster.far_reads import FarReads
from arrow_tq.store.cluster.place import Place, clock_s
from arrow_tq.store.cluster.shard_note import ShardNote
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.cluster import Beat, JoinCluster, LeaveCluster, News, ShardServer
from arrow_tq_schemas.errors import ArrowTQError, Conflict, NotFound, StaleEpoch, Unavailable
from arrow_tq_schemas.ids import ChunkId

BEATS_A_LEASE = 5
AWAY_PAUSE_S = 0.5
"""Between two tries to reach a catalog that is away."""
BEAT_PAUSE_S = 0.02
"""Between two beats that let go of nothing."""
TEND_S = 1.0
"""How often the shard itself is looked after."""
SWEEP_S = 2.0
"""How often what was released leaves the cache of other nodes' chunks; reads look before they are served."""
RECONCILED_AT_A_TIME = 20_000
"""Chunks; between two such pieces a beat may be due."""
JOINING_S = 2.0
"""How long a call waits for the answer to a join or beat that is under way."""
STOP_S = 10.0


class Membership:
    """One thread that joins and beats for as long as the process lives. Thread-safe.

    Args:
        folder: the shard's data directory, which keeps its name and number.
        lock: of the directory; see ``Directory.lock_id``.
        server: where clients reach this process.
        catalog: the catalog to join.
        shard: its chunks.
        orphan_ttl_s: age at which a chunk that no step attached is reaped.
        far: its cache of other nodes' chunks; None: it has none.
        clock: seconds of a clock that never stands still.
    """

    def __init__(
        self,
        folder: Path,
        lock: str,
        server: ShardServer,
        catalog: CatalogLink,
        shard: Shard,
        orphan_ttl_s: float,
        far: FarReads | None = None,
        clock: Callable[[], float] = clock_s,
    ) -> None:
        self._far = far
        self._clock = clock
        self._swept_at = self._tended_at = float("-inf")
        self._folder = folder
        self._lock = lock
        self._server = server
        self._catalog = catalog
        self._shard = shard
        self._orphan_ttl_s = orphan_ttl_s
        note = ShardNote.read_or_make(folder)
        self._node, self._number = note.node, note.number
        self._place: Place | None = None
        self._refused: ArrowTQError | None = None
        self._is_away = False
        """Whether the catalog did not answer the last question after the lease: the thread goes on asking."""
        self._news: tuple[str | None, int] = (None, 0)
        self._round = threading.Lock()
        self._stopped = threading.Event()
        self._log = logger("arrow_tq.shard")
        self.orphans_reaped = 0
        self._thread = threading.Thread(target=self._loop, name="arrow-tq-membership", daemon=True)

    @property
    def number(self) -> int | None:
        """The shard's number; None: it never had one."""
        return self._number

    @property
    def joined(self) -> bool:
        """Whether the catalog counts on this process."""
        return self._place is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing more, and say so: another process need not wait for this one's lease to run out."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        place, self._place = self._place, None
        if place is None:
            return
        try:
            self._catalog.leave(LeaveCluster(number=place.number, epoch=place.epoch, lock=self._lock))
        except ArrowTQError as error:
            self._log.info("left without the catalog's knowing", error=error.message)

    def check(self) -> None:
        """Whether this process is the shard, and so may answer clients.

        A process whose lease ran out (it was stopped, or cut off) asks the catalog first. Where that is away
        it goes on until another process may be the shard. To be asked before an answer is made *and* when
        it is made: between the two the process may have been stopped for any time.

        Raises:
            Unavailable: it has not joined yet, another process is the shard, or may be; the map tells.
        """
        place, now_s = self._place, self._clock()
        if place is None or not place.leased(now_s):
            self._look()
            place, now_s = self._place, self._clock()
        if place is None or self._stopped.is_set() or not place.holds(now_s):
            raise Unavailable(self._why_not(place), number=self._number)

    def check_named(self, number: int, epoch: int) -> None:
        """The same for the catalog, which says whom it takes this process for.

        Raises:
            StaleEpoch: another process holds the shard now, or it is asked for as another epoch.
            Unavailable: as above.
        """
        try:
            self.check()
        except Unavailable as error:
            if self._refused is None:
                raise
            raise StaleEpoch(error.message, **self._refused.details) from None
        place = self._place
        if place is not None and (number, epoch) != (place.number, place.epoch):
            raise StaleEpoch(
                f"this is shard {place.number} in epoch {place.epoch}, not {number} in epoch {epoch}",
                number=place.number,
                current=place.epoch,
            )

    # -- the thread ----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopped.is_set():
            try:
                pause_s = self._tend()
            except Exception:
                # It must outlive one bad round; what failed is in the log and tried again.
                self._log.exception("shard upkeep failed")
                pause_s = 1.0
            self._stopped.wait(pause_s)

    def _tend(self) -> float:
        """One round; says how long to wait for the next."""
        if time.monotonic() - self._tended_at > TEND_S:
            self._tended_at = time.monotonic()
            self._shard.maintain()
            if self._place is not None:
                self._reap()
                self._sweep()
        with self._round:
            if self._refused is not None or self._stopped.is_set():
                return TEND_S
            place = self._place
            # Waiting there for news is what paces the rounds.
            return self._join() if place is None else self._beat(min(1.0, place.lease_s / BEATS_A_LEASE))

    def _look(self) -> None:
        """After a round that is under way, such as a join: beat from the caller's thread, if it may help."""
        if self._stopped.is_set() or self._is_away or not self._round.acquire(timeout=JOINING_S):
            return
        try:
            place = self._place
            if place is not None and not place.leased(self._clock()) and not self._is_away:
                self._beat()
        finally:
            self._round.release()

    def _why_not(self, place: Place | None) -> str:
        if self._refused is not None:
            return f"this process is not the shard any more ({self._refused.message})"
        if self._stopped.is_set():
            return "this shard is being stopped"
        if place is None:
            return f"this shard has not joined its catalog at {self._catalog.url} yet: try again"
        return (
            f"this process may not be shard {place.number} any more: its catalog at {self._catalog.url} "
            "does not answer: try again"
        )

    def _join(self) -> float:
        """Says how long to wait for what comes next."""
        usage = self._shard.usage()
        command = JoinCluster(
            node=self._node,
            server=self._server,
            capacity_bytes=usage.capacity_bytes,
            used_bytes=max(usage.used_bytes, 0),
            number=self._number,
            caches=self._far is not None,
            lock=self._lock,
        )
        began_s = self._clock()
        try:
            joined = self._catalog.join(command)
        except Unavailable as error:
            self._log.info("waiting to join", error=error.message)
            return AWAY_PAUSE_S
        except Conflict as error:
            self._refuse(error)
            return TEND_S
        self._number = joined.number
        ShardNote(self._node, joined.number).write(self._folder)
        self._hear_of(joined.catalog)
        self._news = joined.catalog, 0
        self._place = Place(joined.number, joined.epoch, joined.lease_s, joined.fence_s, began_s)
        self._log.info("joined", number=joined.number, epoch=joined.epoch, catalog=self._catalog.url)
        return 0.0

    def _beat(self, wait_s: float = 0.0) -> float:
        """Wait so long for something to hear; says how long to wait for the next beat."""
        place = self._place
        assert place is not None
        began_s = self._clock()
        try:
            news = self._catalog.beat(self._beat_of(place, wait_s))
            self._place, self._is_away = place.renewed(began_s), False
            self._hear_of(news.catalog)
            self._take(news)
        except StaleEpoch as error:
            self._refuse(error)
            return TEND_S
        except NotFound:
            # The catalog lost its map.
            self._place, self._is_away = None, False
            return 0.0
        except Unavailable as error:
            self._is_away = not place.leased(began_s)
            self._log.info("the catalog does not answer", error=error.message)
            return AWAY_PAUSE_S
        self._news = news.catalog, news.last
        # What was let go is acked at once: whoever released it waits.
        return 0.0 if news.more or news.released else BEAT_PAUSE_S

    def _hear_of(self, catalog: str) -> None:
        if catalog != self._news[0]:
            self._catalog.forget()

    def _beat_of(self, place: Place, wait_s: float = 0.0) -> Beat:
        usage = self._shard.usage()
        catalog, done = self._news
        return Beat(
            number=place.number,
            epoch=place.epoch,
            lock=self._lock,
            used_bytes=max(usage.used_bytes, 0),
            capacity_bytes=usage.capacity_bytes,
            catalog=catalog,
            done=done,
            wait_s=wait_s,
        )

    def _take(self, news: News) -> None:
        if news.reconcile:
            self.reconcile()
            return
        self._pin(map(ChunkId.from_hex, news.attached))
        self._shard.drop(map(ChunkId.from_hex, news.released))

    def reconcile(self) -> None:
        """Bring the chunks to the state that the catalog has for them.

        Raises:
            Unavailable: the catalog is away.
        """
        ids = self._shard.ids()
        counts = {"committed": 0, "released": 0, "unattached": 0}
        for first in range(0, len(ids), RECONCILED_AT_A_TIME):
            some = ids[first : first + RECONCILED_AT_A_TIME]
            states = self._catalog.chunk_states(some)
            committed = [one for one, state in zip(some, states, strict=True) if state == "committed"]
            released = [one for one, state in zip(some, states, strict=True) if state == "released"]
            unknown = [one for one, state in zip(some, states, strict=True) if state is None]
            self._pin(committed)
            self._shard.drop(released)
            # Attached once, to steps that the catalog does not have any more.
            self._shard.unpin([one for one in unknown if self._shard.is_pinned(one)])
            counts["committed"] += len(committed)
            counts["released"] += len(released)
            counts["unattached"] += len(some) - len(committed) - len(released)
            self._stay()
        self._log.info("reconciled", **counts)

    def _stay(self) -> None:
        """Beat in the middle of something long; the news come again with the next beat."""
        place, began_s = self._place, self._clock()
        if place is not None and began_s - place.since_s > place.lease_s / BEATS_A_LEASE:
            self._catalog.beat(self._beat_of(place))
            self._place = place.renewed(began_s)

    def _pin(self, ids: Iterable[ChunkId]) -> None:
        wanted = list(ids)
        missing = set(self._shard.pin(wanted)) if wanted else set()
        if missing:
            self._log.error("attached chunks are not stored here", chunks=len(missing))
            self._shard.pin([one for one in wanted if one not in missing])

    def _reap(self) -> None:
        """Let go of what nobody attached: only what the catalog does not expect, and then did not ask for."""
        orphans = self._shard.orphans(self._orphan_ttl_s)
        if not orphans:
            return
        try:
            states = self._catalog.chunk_states(orphans)
        except Unavailable:
            return
        by_state: dict[str | None, list[ChunkId]] = {}
        for one, state in zip(orphans, states, strict=True):
            by_state.setdefault(state, []).append(one)
        self._pin(by_state.get("committed", []))
        self._shard.drop(by_state.get("released", []))
        count = self._shard.drop_orphans(by_state.get(None, []), self._orphan_ttl_s)
        self.orphans_reaped += count
        if count:
            self._log.info("orphans reaped", chunks=count, older_than_s=self._orphan_ttl_s)

    def _sweep(self) -> None:
        if self._far is None or time.monotonic() - self._swept_at < SWEEP_S:
            return
        self._swept_at = time.monotonic()
        try:
            self._far.sweep()
        except Unavailable as error:
            self._log.info("cache not swept", error=error.message)

    def _refuse(self, error: ArrowTQError) -> None:
        self._refused, self._place = error, None
        self._log.error("this process is not the shard any more; it answers nothing", error=error.message)
