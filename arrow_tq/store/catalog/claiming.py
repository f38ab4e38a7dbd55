"""Claiming: choose on a snapshot, take in one operation, wait where nothing is available.

One claim chooses at a time, so that claimers do not choose the same segments; what changes between
choosing and taking (a discard) is seen by the taking operation, and the claim chooses again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import apsw

from arrow_tq.store.catalog.claims import rows_like, take
from arrow_tq.store.catalog.database import Readers
from arrow_tq.store.catalog.discards import discard_segments
from arrow_tq.store.catalog.expiry import leases_are_due
from arrow_tq.store.catalog.leases import expire_claims
from arrow_tq.store.catalog.requests import answered, once
from arrow_tq.store.catalog.runs import CommittedRuns, RunRecord, WriterRuns
from arrow_tq.store.catalog.selection import Wish, choose, claim_task, find_stale, make_wish
from arrow_tq.store.catalog.waiting import Waiters
from arrow_tq.store.catalog.writer import Again, Apply, Change
from arrow_tq_schemas.commands import Claim, ClaimInfo, View, Wire
from arrow_tq_schemas.errors import Busy, InternalError, Unavailable

STALE = "stale"
CHOICES_MAX = 100
"""Times that one claim chooses again because what it chose was gone."""
WISHES_KEPT_MAX = 1024
_WISH = (
    *("run", "where", "task", "unit", "group_size", "view", "order_by", "max_staleness", "on_stale"),
    "epoch",
)
"""What decides whether anything is there for a claim; its limit only decides how much of it."""
Run = Callable[[Apply[Wire]], Wire]
"""Runs one operation in the writer: its result, its released chunks dropped, its error raised."""


class Claiming:
    """Answers ``Claim``."""

    def __init__(
        self, readers: Readers, runs: CommittedRuns, writer_runs: WriterRuns, waiters: Waiters, run: Run
    ) -> None:
        self._readers = readers
        self._runs = runs
        self._writer_runs = writer_runs
        self._waiters = waiters
        self._run = run
        self._choosing = threading.Lock()
        self._nothing: dict[tuple[object, ...], int] = {}
        """By wish, the turn at which the last look found nothing. Under ``_choosing``."""

    def claim(self, command: Claim, is_gone: Callable[[], bool]) -> ClaimInfo:
        """Take what is available; wait for it up to ``wait_s``; then an empty claim.

        Args:
            command: the claim.
            is_gone: whether the claimer went away, asked after a wait: nothing is taken for one that did.

        Raises:
            Unavailable: the claimer went away, or the catalog was closed.
            LimitTooSmall: the first available unit has more segments than the limit.
            InvalidInput, InvalidQuery: task, predicate or order.
        """
        until_s = time.monotonic() + command.wait_s
        before = self._before(command)
        if before is not None:
            return before
        waited = False
        while True:
            if waited and is_gone():
                raise Unavailable(f"claim in run {command.run!r}: the claimer went away while it waited")
            turn = self._waiters.turn
            last = time.monotonic() >= until_s or command.like is not None
            info, look_s = self._attempt(command, last)
            if info is not None:
                return info
            # A claim that nothing wakes looks once more when its time is over.
            self._waiters.wait(turn, until_s, look_s)
            waited = True

    def _attempt(self, command: Claim, last: bool) -> tuple[ClaimInfo | None, float]:
        """One look: a claim, an empty one if this is the last look, or None; and how long it took."""
        with self._choosing:
            began_s = time.perf_counter()
            return self._look(command, last), time.perf_counter() - began_s

    def _look(self, command: Claim, last: bool) -> ClaimInfo | None:
        run = self._runs.get(command.run)
        self._expire()
        for _ in range(CHOICES_MAX):
            turn = self._waiters.turn
            if not last and self._nothing.get(_wish_of(command)) == turn:
                # Another claim with the same wish found nothing, and nothing has happened since.
                return None
            with self._readers.snapshot() as connection:
                task, view, rows, stale = self._choose(connection, run, command)
            if stale:
                self._discard(stale)
                continue
            if not rows and not last:
                self._note_nothing(command, turn)
                return None
            try:
                reply = self._run(once(command, take(self._writer_runs, command, task, view, rows)))
            except Again:
                continue
            return _info(reply)
        raise Busy(f"claim in run {command.run!r}: chosen segments were gone {CHOICES_MAX} times")

    def _note_nothing(self, command: Claim, turn: int) -> None:
        if len(self._nothing) >= WISHES_KEPT_MAX:
            self._nothing.clear()
        self._nothing[_wish_of(command)] = turn

    def _before(self, command: Claim) -> ClaimInfo | None:
        """The reply to this request, if it was answered already: nothing is to be waited for."""
        with self._readers.snapshot() as connection:
            reply = answered(connection, command)
        return None if reply is None else _info(reply)

    def _choose(
        self, connection: apsw.Connection, run: RunRecord, command: Claim
    ) -> tuple[str, View, list[int], list[int]]:
        """Task, view, segments to take, and stale ones to discard first."""
        if command.like is not None:
            task = claim_task(run, command.task)
            view, rows = rows_like(connection, run, command.like, task, command.limit)
            return task, view, rows, []
        wish = make_wish(connection, run, command)
        stale = self._stale(connection, wish, command)
        return wish.task, wish.view, [] if stale else choose(connection, wish), stale

    def _stale(self, connection: apsw.Connection, wish: Wish, command: Claim) -> list[int]:
        if command.on_stale == "keep" or command.max_staleness is None:
            return []
        return find_stale(connection, wish, whole_groups=command.on_stale == "discard_group")

    def _discard(self, rows: Sequence[int]) -> None:
        def apply(change: Change) -> Wire:
            discard_segments(change, rows, STALE)
            return Wire()

        self._run(apply)

    def _expire(self) -> None:
        """Leases that are over count at once, not only at the next upkeep."""
        with self._readers.snapshot() as connection:
            due = leases_are_due(connection)
        if due:

            def apply(change: Change) -> Wire:
                expire_claims(change)
                return Wire()

            self._run(apply)


def _wish_of(command: Claim) -> tuple[object, ...]:
    return tuple(getattr(command, name) for name in _WISH)


def _info(reply: Wire) -> ClaimInfo:
    if not isinstance(reply, ClaimInfo):
        raise InternalError(f"reply to a claim: {type(reply).__name__}")
    return reply
