"""SQL over the metadata: a service that keeps a supervised worker process in step with the catalog.

Before each query the worker gets what changed in the tables that the query names, up to the revision at
its beginning: a query sees every commit acked before it began. See ``arrow_tq.sql_worker`` for what
confines a query.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from arrow_tq.sql_process import SqlProcess
from arrow_tq.sql_protocol import Frame, SqlLimits, table_frame
from arrow_tq_schemas.errors import Busy, Conflict, InvalidQuery, QueryKilled

__all__ = ["MetadataSource", "SqlLimits", "SqlService"]

APPLY_BYTES = 16 << 20
"""Rows go to the worker in pieces of about this size."""
KILL_AFTER_S = 0.5
"""How long after its deadline a query that did not stop itself is killed."""
ROUNDS_MAX = 4
"""How often changes are asked again so that all tables stand at one revision, on a store that is written."""
_CHILDREN_FIRST = (
    "bundles",
    *("spans", "chunks", "claims", "segments", "step_blobs", "blobs", "steps", "sessions", "marks"),
    "runs",
)
"""Whatever is committed in between, a row that a query sees then finds the rows it refers to."""


class MetadataSource(Protocol):
    """Where the metadata comes from: the catalog."""

    def revision(self) -> int:
        """Number of the last commit."""

    def changes(self, table: str, run: str | None, after: int) -> tuple[pa.Table, int]:
        """Rows of ``table`` that changed after revision ``after``, and the revision that they reach.

        Schema: ``TABLES[table]``, then ``columns`` (JSON text of user columns, may be null), ``rev``
        (int64) and ``key`` (int64, unique per row: a row replaces the one of its key). ``run=None``
        is all runs.
        """

    def user_columns(self, table: str, run: str | None) -> dict[str, str]:
        """User columns so far: name to bool, int, float, text or json (mixed or nested)."""


@dataclass(slots=True)
class _Scope:
    """What the worker has of one run, or of all."""

    reached: dict[str, int] = field(default_factory=dict)
    """Revision by table."""


class SqlService:
    """Runs queries, one at a time. Any thread may call; a fork of the process may not."""

    def __init__(self, source: MetadataSource, limits: SqlLimits) -> None:
        self._source = source
        self._limits = limits
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._waiting = threading.BoundedSemaphore(limits.waiting_max)
        self._worker: SqlProcess | None = None
        self._scopes: OrderedDict[str | None, _Scope] = OrderedDict()
        self._closed = False

    def query(self, query: str, run: str | None, lent: Mapping[str, pa.Table] | None = None) -> pa.Table:
        """The result of one SELECT over the tables of ``arrow_tq_schemas.tables``.

        Sees every commit acked before the call, of ``run`` only, or of all runs where it is None; and the
        tables ``lent`` to this one query, by name.

        Raises:
            InvalidQuery: not one statement that only reads, or DuckDB refuses it; has DuckDB's message.
            QueryKilled: it passed a bound of ``SqlLimits``, named, or its worker died.
            Busy: too many queries wait, or this one waited too long.
        """
        self._check(query)
        with self._my_turn():
            worker = self._ready()
            try:
                self._sync(worker, run, tables_named(query))
                for name, table in (lent or {}).items():
                    frame = table_frame({"op": "lend", "scope": run, "table": name}, table)
                    worker.ask(frame, self._limits.timeout_s, "loading a bundle")
                request = Frame({"op": "query", "scope": run, "query": query})
                # DuckDB stops most queries by itself and keeps its tables; the kill is for the rest.
                return worker.ask(request, self._limits.timeout_s + KILL_AFTER_S, "running the query").table()
            finally:
                if not worker.alive:
                    self._drop()

    def close(self) -> None:
        """End the worker; a query that runs is killed. Idempotent."""
        self._closed = True
        worker = self._worker
        if worker is None or self._pid != os.getpid():
            return
        if not self._turn.acquire(timeout=self._limits.close_s):
            worker.interrupt()
            self._turn.acquire()
        try:
            if self._worker is not None:
                self._worker.close()
            self._drop()
        finally:
            self._turn.release()

    def _check(self, query: str) -> None:
        if not isinstance(query, str):
            raise InvalidQuery(f"SQL: expected text, got {type(query).__name__}")
        try:
            size = len(query.encode())
        except UnicodeEncodeError as error:
            raise InvalidQuery(f"SQL: a lone surrogate at {error.start} is not text") from None
        if size > self._limits.query_bytes_max:
            bound = self._limits.query_bytes_max
            raise InvalidQuery(f"SQL: a query of {size} bytes, {bound} at most (query_bytes_max)")
        if "\x00" in query:
            raise InvalidQuery(f"SQL: NUL at {query.index(chr(0))} is not allowed")
        if self._pid != os.getpid():
            raise Conflict(
                f"SQL: the service of process {self._pid} cannot be used in its fork {os.getpid()}"
            )

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        if not self._waiting.acquire(blocking=False):
            raise Busy(f"SQL: {self._limits.waiting_max} queries wait already (waiting_max)")
        try:
            if not self._turn.acquire(timeout=self._limits.wait_s):
                raise Busy(f"SQL: waited {self._limits.wait_s} s (wait_s) for the queries before")
            try:
                if self._closed:
                    raise Conflict("SQL: the service was closed")
                yield
            finally:
                self._turn.release()
        finally:
            self._waiting.release()

    def _ready(self) -> SqlProcess:
        """The worker; started at the first query and after one was killed."""
        if self._worker is not None and not self._worker.running():
            self._worker.kill()
            self._drop()
        if self._worker is None:
            self._worker = SqlProcess(self._limits)
        return self._worker

    def _drop(self) -> None:
        self._worker = None
        self._scopes.clear()

    # -- keeping in step -----------------------------------------------------------------------

    def _sync(self, worker: SqlProcess, run: str | None, tables: list[str]) -> None:
        """Bring the tables to one revision, no older than now.

        On a store that is written all the time they may end at different ones, children before parents.
        """
        scope = self._scope(worker, run)
        for _ in range(ROUNDS_MAX):
            newest = self._source.revision()
            behind = [table for table in tables if scope.reached.get(table, -1) < newest]
            if not behind:
                return
            for table in behind:
                self._advance(worker, run, scope, table)

    def _scope(self, worker: SqlProcess, run: str | None) -> _Scope:
        if run not in self._scopes:
            while len(self._scopes) >= self._limits.scopes_max:
                oldest, _ = self._scopes.popitem(last=False)
                request = Frame({"op": "forget", "scope": oldest})
                worker.ask(request, self._limits.timeout_s, "forgetting a run")
            self._scopes[run] = _Scope()
        self._scopes.move_to_end(run)
        return self._scopes[run]

    def _advance(self, worker: SqlProcess, run: str | None, scope: _Scope, table: str) -> None:
        # Columns are read after the rows, so that they cover them.
        rows, reached = self._source.changes(table, run, scope.reached.get(table, -1))
        if rows.num_rows:
            header = {
                "op": "apply",
                "scope": run,
                "table": table,
                "user_columns": self._source.user_columns(table, run),
            }
            try:
                for piece in _pieces(rows):
                    worker.ask(table_frame(header, piece), self._limits.timeout_s, f"loading table {table!r}")
            except BaseException as error:
                if worker.alive:
                    worker.kill()  # half of the rows may be there
                if isinstance(error, QueryKilled):
                    error.details["table"] = table
                raise
        scope.reached[table] = reached


def tables_named(query: str) -> list[str]:
    """The tables that a query can refer to, children first.

    A table cannot be read without its name in the text (the guard refuses functions that run text as
    SQL). A query that names none may ask for the catalogue of tables: then all.
    """
    lowered = query.lower()
    named = [table for table in _CHILDREN_FIRST if table in lowered]
    return named or list(_CHILDREN_FIRST)


def _pieces(rows: pa.Table) -> Iterator[pa.Table]:
    size = max(1, int(rows.num_rows * APPLY_BYTES / max(rows.nbytes, 1)))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)
