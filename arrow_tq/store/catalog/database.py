"""The SQLite file: one connection that writes, a bounded pool of connections that read."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from arrow_tq.store.catalog.config import CatalogConfig
from arrow_tq.store.catalog.filesystem import refuse_network_filesystem
from arrow_tq.store.catalog.schema import migrate
from arrow_tq_schemas.errors import Busy, Unavailable

PAGE_BYTES = 4096
LOCK_WAIT_MS = 5000
CACHE_KIB = 32 << 10
STATEMENTS_CACHED = 256


def open_writer(config: CatalogConfig) -> apsw.Connection:
    """The connection that writes: WAL, migrated, and as durable as ``NORMAL`` (kill -9 of everything).

    Raises:
        Unsupported: a network filesystem, or a file of a newer version.
    """
    refuse_network_filesystem(config.path)
    connection = _open(config.path)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "normal")
    # Checkpoints run beside the writer (``checkpoint``); this bound is for when they cannot keep up.
    connection.wal_autocheckpoint(max(1, config.wal_bytes_max // PAGE_BYTES))
    migrate(connection)
    return connection


def checkpoint(connection: apsw.Connection) -> None:
    """Copy what is committed from the log into the file, without blocking readers or the writer."""
    # Busy: a commit found the log long and is at it already, which is as good.
    with contextlib.suppress(apsw.BusyError):
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


class Readers:
    """Connections that read. Each ``snapshot`` sees one committed state, whole."""

    def __init__(self, config: CatalogConfig) -> None:
        self._path = config.path
        self._readers_max = config.readers_max
        self._wait_s = config.reader_wait_s
        self._slots = threading.BoundedSemaphore(config.readers_max)
        self._idle: list[apsw.Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def snapshot(self) -> Iterator[apsw.Connection]:
        """A connection inside a read transaction, for the calling thread alone.

        Raises:
            Busy: ``readers_max`` are in use and none came back within ``reader_wait_s``.
        """
        if not self._slots.acquire(timeout=self._wait_s):
            raise Busy(f"readers_max {self._readers_max} in use for {self._wait_s} s", setting="readers_max")
        try:
            connection = self._take()
            try:
                connection.execute("BEGIN")
                try:
                    yield connection
                finally:
                    connection.execute("COMMIT")
            finally:
                self._give_back(connection)
        finally:
            self._slots.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> apsw.Connection:
        with self._lock:
            if self._closed:
                raise Unavailable(f"catalog {str(self._path)!r} is closed")
            if self._idle:
                return self._idle.pop()
        connection = _open(self._path)
        connection.pragma("query_only", True)
        return connection

    def _give_back(self, connection: apsw.Connection) -> None:
        # A cursor that was left in the middle holds on to its snapshot: the next reader would see the past.
        clean = connection.txn_state() == apsw.SQLITE_TXN_NONE
        with self._lock:
            if clean and not self._closed:
                self._idle.append(connection)
                return
        connection.close()


def open_checkpointer(path: Path) -> apsw.Connection:
    """A connection for ``checkpoint`` alone."""
    return _open(path)


def _open(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path), statementcachesize=STATEMENTS_CACHED)
    connection.set_busy_timeout(LOCK_WAIT_MS)
    connection.pragma("cache_size", -CACHE_KIB)
    # Sorts and temporary tables of ours are small; temporary files would need a directory.
    connection.pragma("temp_store", "memory")
    return connection


def row_list(rows: Iterable[int]) -> str:
    """Row numbers for ``IN (SELECT value FROM json_each(?))``: one statement whatever their number."""
    return json.dumps(list(rows))
