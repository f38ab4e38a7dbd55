"""The writer: takes queued operations and commits many in one transaction.

A thread of its own does that, or, where nothing else is under way, the very thread that brings an operation:
to hand it over and to be woken again costs more than most operations.

An operation that fails rolls back alone. Callers get their results after
COMMIT, together with what they must do then (free chunks).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import apsw

from arrow_tq.logs import logger
from arrow_tq.store.catalog.config import CatalogConfig
from arrow_tq.store.catalog.waiting import Waiters
from arrow_tq_schemas.errors import ArrowTQError, Busy, InternalError, InvalidInput, StoreFull, Unavailable
from arrow_tq_schemas.ids import ChunkId

Result = TypeVar("Result")
CLOSE_S = 60.0
Undo = Callable[[apsw.Connection], None]


class Again(Exception):
    """What an operation was prepared from has changed since: it must be prepared again. Ours alone."""


class Change:
    """One operation's hold on the transaction: SQL, and what follows from it.

    Attributes:
        rev: number of the transaction, for every row that it touches.
        now_us: wall clock, microseconds since 1970.
        released: chunks to free once the transaction is committed, all layer groups.
        undo: run where the operation, or the commit, fails; the rows are rolled back by then.
        after: run by the writer once the transaction is committed; quick, must not raise.
        wakes: whether a waiting claim may find something now.
    """

    __slots__ = (
        *("_after", "_released", "_undo", "connection", "execute", "executemany"),
        *("now_us", "rev", "wakes"),
    )

    def __init__(self, connection: apsw.Connection, rev: int, now_us: int) -> None:
        self.connection = connection
        self.execute = connection.execute
        self.executemany = connection.executemany
        self.rev = rev
        self.now_us = now_us
        # Made when they are needed: most operations need none, and the collector counts every list.
        self._released: list[ChunkId] | None = None
        self._undo: list[Undo] | None = None
        self._after: list[Callable[[], None]] | None = None
        self.wakes = False

    @property
    def released(self) -> list[ChunkId]:
        if self._released is None:
            self._released = []
        return self._released

    @released.setter
    def released(self, ids: list[ChunkId]) -> None:
        self._released = ids

    @property
    def undo(self) -> list[Undo]:
        if self._undo is None:
            self._undo = []
        return self._undo

    @property
    def after(self) -> list[Callable[[], None]]:
        if self._after is None:
            self._after = []
        return self._after

    def follow(self) -> Sequence[ChunkId]:
        """Run what comes after the commit; gives what is to be freed."""
        for after in self._after or ():
            after()
        return self._released or ()

    def take_back(self) -> None:
        """Undo what the operation did outside the transaction, which goes on."""
        for undo in self._undo or ():
            undo(self.connection)
        self._undo = None


Apply = Callable[[Change], Result]


@dataclass(slots=True)
class Outcome(Generic[Result]):
    """What became of one operation: a result, or the error in its place."""

    value: Result | None = None
    error: ArrowTQError | Again | None = None
    released: Sequence[ChunkId] = ()


@dataclass(slots=True, eq=False)
class Beside(Generic[Result]):
    """Operations that can go into a transaction which others need: it costs more than they do."""

    applies: Sequence[Apply[Result]]
    outcomes: list[Outcome[Result]] | None = None
    """None: they were not run yet."""


@dataclass(slots=True, eq=False)
class _Job:
    applies: Sequence[Apply[Any]]
    outcomes: list[Outcome[Any]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    done: threading.Lock = field(default_factory=threading.Lock)


class Writer:
    """Owns the writing connection. ``run`` may be called from any thread."""

    def __init__(self, connection: apsw.Connection, config: CatalogConfig, waiters: Waiters) -> None:
        self._connection = connection
        self._config = config
        self._waiters = waiters
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(config.queue_max)
        self._turn = threading.Lock()
        """Held by whoever uses the connection."""
        self._closing = threading.Lock()
        self._closed = False
        self._full_wanted = False
        self._full = False
        self._log = logger("arrow_tq.catalog")
        self.rev = int(connection.execute("SELECT rev FROM state").get)
        """Number of the last committed transaction."""
        self._thread = threading.Thread(target=self._loop, name="arrow-tq-catalog", daemon=True)
        self._thread.start()

    def run(self, applies: Sequence[Apply[Result]]) -> list[Outcome[Result]]:
        """Run operations in order, each atomic by itself; returns after their transaction committed.

        Raises:
            Busy: ``queue_max`` jobs were waiting for ``queue_wait_s``.
            Unavailable: the catalog is closed.
        """
        if not self._room.acquire(timeout=self._config.queue_wait_s):
            raise Busy(
                f"queue_max {self._config.queue_max} operations waited {self._config.queue_wait_s} s "
                "for the catalog's writer",
                setting="queue_max",
            )
        try:
            job = _Job(applies)
            if self._lead(job):
                return job.outcomes
            job.done.acquire()
            with self._closing:
                if self._closed:
                    raise Unavailable("the catalog is closed")
                self._jobs.put(job)
            job.done.acquire()
        finally:
            self._room.release()
        return job.outcomes

    def require_full_sync(self) -> None:
        """From the next transaction on, a commit returns only once it is on disk."""
        self._full_wanted = True

    def close(self) -> None:
        """Finish what is queued, then stop. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise InternalError(f"the catalog's writer did not stop within {CLOSE_S} s")
        with self._turn:
            self._connection.close()

    def _lead(self, job: _Job) -> bool:
        """Do it here and now, if nothing else is under way; False: it has to be queued.

        Never in the main thread: an interrupt there could end in the middle of a transaction.
        """
        if threading.current_thread() is threading.main_thread() or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._closed or not self._jobs.empty():
                return False
            self._transact([job])
        finally:
            self._turn.release()
        return True

    # -- the thread ----------------------------------------------------------------------------

    def _loop(self) -> None:
        closing = False
        while not closing:
            batch: list[_Job] = []
            job = self._jobs.get()
            size = 0
            while job is not None:
                batch.append(job)
                size += len(job.applies)
                if size >= self._config.commit_batch_max:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            closing = job is None
            if batch:
                with self._turn:
                    self._transact(batch)

    def _transact(self, batch: list[_Job]) -> None:
        """One transaction. Whatever happens, every job gets its outcomes."""
        try:
            committed = self._attempt(batch)
        except Exception as error:
            self._log.exception("transaction failed", operations=sum(len(job.applies) for job in batch))
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._fail(batch, _translate(error))
            committed = False
        if committed and any(change.wakes for job in batch for change in job.changes):
            self._waiters.wake()
        for job in batch:
            if job.done.locked():
                job.done.release()

    def _attempt(self, batch: list[_Job]) -> bool:
        connection = self._connection
        if self._full_wanted and not self._full:
            connection.pragma("synchronous", "full")
            self._full = True
        rev, now_us = self.rev + 1, time.time_ns() // 1000
        connection.execute("BEGIN IMMEDIATE")
        if not self._run_plainly(batch, rev, now_us):
            connection.execute("ROLLBACK")
            for job in batch:
                _undo(job.changes)
                job.changes.clear()
                job.outcomes.clear()
            connection.execute("BEGIN IMMEDIATE")
            self._run_in_savepoints(batch, rev, now_us)
        if all(outcome.error is not None for job in batch for outcome in job.outcomes):
            connection.execute("ROLLBACK")
            return False
        connection.execute("UPDATE state SET rev = ?", (rev,))
        connection.execute("COMMIT")
        self.rev = rev
        for job in batch:
            for change, outcome in zip(job.changes, job.outcomes, strict=True):
                if outcome.error is None:
                    outcome.released = change.follow()
        return True

    def _run_plainly(self, batch: list[_Job], rev: int, now_us: int) -> bool:
        """Run the batch without savepoints, which cost as much as a small operation.

        False where an operation failed after it had written: all is to be rolled back and run again.
        Nearly all that fail do so in their checks, before the first write.
        """
        connection = self._connection
        for job in batch:
            for apply in job.applies:
                change = Change(connection, rev, now_us)
                job.changes.append(change)
                before = connection.total_changes()
                try:
                    job.outcomes.append(Outcome(apply(change)))
                except Exception as error:
                    if not connection.in_transaction:
                        # SQLite gave up the whole transaction (a full disk, an I/O error).
                        raise
                    if connection.total_changes() != before:
                        return False
                    _undo([change])
                    change.wakes = False
                    job.outcomes.append(Outcome(error=self._explain(error)))
        return True

    def _run_in_savepoints(self, batch: list[_Job], rev: int, now_us: int) -> None:
        for job in batch:
            for apply in job.applies:
                change = Change(self._connection, rev, now_us)
                job.changes.append(change)
                job.outcomes.append(self._apply(apply, change))

    def _apply(self, apply: Apply[Any], change: Change) -> Outcome[Any]:
        change.execute("SAVEPOINT operation")
        try:
            value = apply(change)
        except Exception as error:
            if not self._connection.in_transaction:
                raise
            change.execute("ROLLBACK TO operation")
            change.execute("RELEASE operation")
            _undo([change])
            change.wakes = False
            return Outcome(error=self._explain(error))
        change.execute("RELEASE operation")
        return Outcome(value)

    def _fail(self, batch: list[_Job], error: ArrowTQError) -> None:
        for job in batch:
            undone = [
                change
                for index, change in enumerate(job.changes)
                if index >= len(job.outcomes) or job.outcomes[index].error is None
            ]
            _undo(undone)
            job.outcomes[:] = [
                outcome if outcome.error is not None else Outcome(error=error) for outcome in job.outcomes
            ]
            job.outcomes += [Outcome(error=error) for _ in range(len(job.applies) - len(job.outcomes))]

    def _explain(self, error: Exception) -> ArrowTQError | Again:
        if isinstance(error, Again):
            return error
        if not isinstance(error, ArrowTQError | UnicodeEncodeError | OverflowError):
            self._log.exception("operation failed", exc_info=error)
        return _translate(error)


def _undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.take_back()


def _translate(error: Exception) -> ArrowTQError:
    """An exception of an operation as one of ours."""
    if isinstance(error, ArrowTQError):
        return error
    if isinstance(error, apsw.FullError):
        return StoreFull(f"the catalog's disk is full: {error}")
    if isinstance(error, UnicodeEncodeError):
        return InvalidInput(f"text with a lone surrogate at {error.start} cannot be stored")
    if isinstance(error, OverflowError):
        return InvalidInput(f"an integer beyond 64 bits cannot be stored: {error}")
    return InternalError(f"catalog: {type(error).__name__}: {error}")
