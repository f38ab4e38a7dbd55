"""What happens in the background: expiries, orphans, memory given back; and reconciling at start."""

from __future__ import annotations

import threading
from collections.abc import Callable

from arrow_tq.logs import logger
from arrow_tq.store.catalog import Catalog
from arrow_tq.store.shard import Shard

STOP_S = 10.0


class Upkeep:
    """One thread that looks after a store about once a second."""

    def __init__(
        self,
        shard: Shard,
        catalog: Catalog,
        orphan_ttl_s: float,
        period_s: float,
        soft_mark: float,
        also: Callable[[], None],
    ) -> None:
        """``also`` is called each round, before orphans are looked for."""
        self._shard = shard
        self._catalog = catalog
        self._orphan_ttl_s = orphan_ttl_s
        self._period_s = period_s
        self._soft_mark = soft_mark
        self._also = also
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="arrow-tq-upkeep", daemon=True)
        self._log = logger("arrow_tq.upkeep")
        self.orphans_reaped = 0
        self.kept_given_up = 0
        """Pairs of segment and task kept for a rewind, and freed because their room was needed."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def reconcile(self) -> None:
        """Bring the shard's chunks to the state that the catalog has for them.

        Committed ones are attached again, released ones dropped (a crash came between the two), and
        those that the catalog never saw wait for their writer, or for the orphans' time to live.
        """
        ids = self._shard.ids()
        states = self._catalog.chunk_states(ids)
        committed = [chunk_id for chunk_id, state in zip(ids, states, strict=True) if state == "committed"]
        released = [chunk_id for chunk_id, state in zip(ids, states, strict=True) if state == "released"]
        self._shard.pin(committed)
        self._shard.drop(released)
        self._log.info(
            "reconciled",
            committed=len(committed),
            released=len(released),
            unattached=len(ids) - len(committed) - len(released),
        )
        chunks, size = self._catalog.missing(set(committed), self._shard.config.number)
        self._shard.note_lost(chunks, size)
        if chunks:
            # Such as those of memory after a reboot: reading one says that it is lost.
            self._log.error("chunks are lost", chunks=chunks, bytes=size)

    def tend(self) -> None:
        """One round."""
        self._catalog.maintain()
        self._also()
        self._reap()
        self._give_up_kept()
        self._shard.maintain()

    def _give_up_kept(self) -> None:
        """Past the soft mark, what is kept for a rewind makes room: it was trained, the rest was not.

        A mark a round, so that its extents can be given back before the next one is looked at.
        """
        if not self._is_full() or self._catalog.keeping.is_empty():
            return
        # What is allocated ahead, or idle, goes first.
        self._shard.make_room()
        if not self._is_full():
            return
        freed = self._catalog.keeping.give_up_oldest()
        if freed is not None:
            mark, count = freed
            self.kept_given_up += count
            self._log.warning("what a mark kept was freed for its room", mark=mark, segments=count)

    def _is_full(self) -> bool:
        usage = self._shard.usage()
        return usage.used_bytes > self._soft_mark * usage.capacity_bytes

    def _reap(self) -> None:
        orphans = self._shard.orphans(self._orphan_ttl_s)
        if not orphans:
            return
        states = self._catalog.chunk_states(orphans)
        gone = [chunk_id for chunk_id, state in zip(orphans, states, strict=True) if state != "committed"]
        count = self._shard.drop_unpinned(gone)
        self.orphans_reaped += count
        if count:
            self._log.info("orphans reaped", chunks=count, older_than_s=self._orphan_ttl_s)

    def _loop(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self.tend()
            except Exception:
                # Upkeep must outlive one bad round; what failed is in the log and tried again.
                self._log.exception("upkeep failed")
