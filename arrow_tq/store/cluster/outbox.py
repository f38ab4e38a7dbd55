"""What the catalog has to tell each far shard: chunks that a step attached, chunks that were released.

Kept in memory, bounded. Nothing depends on it arriving: where some of it is lost (the catalog started
anew, a shard was away for long) the shard is told to reconcile, and asks for the state of all it has.
Released chunks are told at once to a shard that waits for them: their memory is wanted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arrow_tq_schemas.cluster import News
from arrow_tq_schemas.ids import ChunkId

NEWS_MAX = 50_000
"""Chunk ids in one answer at most."""
KEPT_MAX = 1_000_000
"""Chunk ids kept for one shard at most."""


@dataclass(slots=True)
class _Line:
    """The news of one shard, by number; ids of one state travel together."""

    waiting: deque[tuple[int, str, Sequence[str]]] = field(default_factory=deque)
    last: int = 0
    size: int = 0
    reconcile: bool = True
    """A shard that this catalog has not heard of yet may have missed anything."""
    told_at: int = 0
    """Number of the news with which it was told to reconcile."""
    urgent: int = 0
    """Number of the last news of released chunks."""
    done: int = 0
    """Number of the last news that the shard dealt with."""


class Outbox:
    """News by shard number. Thread-safe."""

    def __init__(self, catalog: str) -> None:
        self._catalog = catalog
        self._lock = threading.Condition()
        self._lines: dict[int, _Line] = {}

    def add(self, number: int, state: str, ids: Sequence[ChunkId]) -> int:
        """``state`` is ``attached`` or ``released``. Gives the number of the news."""
        with self._lock:
            line = self._lines.setdefault(number, _Line())
            line.last += 1
            if state == "released":
                line.urgent = line.last
                self._lock.notify_all()
            if line.size + len(ids) > KEPT_MAX:
                line.waiting.clear()
                line.size = 0
                line.reconcile = True
                line.told_at = 0
                return line.last
            line.waiting.append((line.last, state, [one.hex for one in ids]))
            line.size += len(ids)
            return line.last

    def wait_done(self, numbers: Mapping[int, int], timeout_s: float) -> bool:
        """Wait until the shards have dealt with these news, by shard; whether they have."""
        with self._lock:
            return self._lock.wait_for(
                lambda: all(self._lines[number].done >= last for number, last in numbers.items()), timeout_s
            )

    def joined(self, number: int) -> None:
        """A new process is this shard: it begins with asking for everything."""
        with self._lock:
            last = self._lines[number].last if number in self._lines else 0
            self._lines[number] = _Line(last=last)
            self._lock.notify_all()

    def take(self, number: int, catalog: str | None, done: int, wait_s: float = 0.0) -> News:
        """What comes after news ``done`` of ``catalog``, with which the shard has dealt.

        Waits up to ``wait_s`` for news of released chunks, unless there are some, or others that are lost.
        """
        if catalog != self._catalog:
            # It counts the news of a catalog before this one.
            done = 0
        with self._lock:
            line = self._lines.setdefault(number, _Line())
            if line.reconcile and line.told_at and done >= line.told_at:
                line.reconcile = False
            line.done = done
            self._lock.notify_all()
            if not line.reconcile:
                self._lock.wait_for(
                    lambda: line.urgent > done or line.reconcile or line.done != done, timeout=wait_s
                )
            while line.waiting and line.waiting[0][0] <= done:
                line.size -= len(line.waiting.popleft()[2])
            if line.reconcile:
                # Its own number, so that the answer to it can be told from an older one.
                line.last += not line.told_at
                line.told_at = line.told_at or line.last
                return News(last=line.told_at, reconcile=True, catalog=self._catalog)
            by_state: dict[str, list[str]] = {"attached": [], "released": []}
            last, count = done, 0
            for last_of, state, ids in line.waiting:
                if count and count + len(ids) > NEWS_MAX:
                    break
                by_state[state] += ids
                last, count = last_of, count + len(ids)
            more = bool(line.waiting) and last < line.waiting[-1][0]
            return News(last=last, more=more, catalog=self._catalog, **by_state)
