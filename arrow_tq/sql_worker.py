"""The process that runs users' SQL: ``python -m arrow_tq.sql_worker``, a socket as its standard input.

It is the only module that imports duckdb. It holds the metadata of a few scopes (one run, or all), each
in an in-memory DuckDB of its own, so that a run's query has no way to see another run. It reads no file,
and ends when its parent does. Nothing stops a query from inside in all cases: the parent kills the
process when a deadline passes.
"""

from __future__ import annotations

import os
import queue
import resource
import select
import socket
import sys
import threading
import traceback
from typing import NoReturn

import duckdb
import pyarrow as pa

from arrow_tq.sql_guard import check_tree, split_explain
from arrow_tq.sql_protocol import Channel, Frame, SqlLimits, table_frame
from arrow_tq.sql_tables import SCHEMA, check_batch, create_table, create_view, insert
from arrow_tq_schemas.errors import ArrowTQError, InternalError, InvalidQuery, QueryKilled
from arrow_tq_schemas.tables import TABLES

BATCH_ROWS = 8_192
MESSAGE_LINES_MAX = 8
MESSAGE_CHARS_MAX = 1_000
DEAD_ROWS_MAX = 4_096
"""Replaced rows that a table may keep beside as many live ones before it is written anew."""
SCOPE_OVERHEAD_BYTES = 256 << 20
"""Address space (not memory) that a DuckDB instance reserves for its threads."""
PARENT_CHECK_S = 1.0
FILES_MAX = 64
_SETTINGS = (
    "SET GLOBAL temp_directory = ''",
    "SET GLOBAL enable_external_access = false",
    "SET GLOBAL python_enable_replacements = false",
    "SET GLOBAL autoinstall_known_extensions = false",
    "SET GLOBAL autoload_known_extensions = false",
    "SET GLOBAL allow_community_extensions = false",
    "SET GLOBAL TimeZone = 'UTC'",
)


class Scope:
    """The tables of one run, or of all."""

    def __init__(self, limits: SqlLimits) -> None:
        self._limits = limits
        self._connection = duckdb.connect(":memory:")
        self._live = dict.fromkeys(TABLES, 0)
        self._dead = dict.fromkeys(TABLES, 0)
        self._shown: dict[str, dict[str, str]] = {name: {} for name in TABLES}
        self._lent: dict[str, pa.Table] = {}
        """For the next query alone."""
        run = self._connection.execute
        for setting in _SETTINGS:
            run(setting)
        run(f"SET GLOBAL threads = {int(limits.threads)}")
        run(f"SET GLOBAL memory_limit = '{int(limits.memory_bytes)}B'")
        run(f"SET GLOBAL max_execution_time = {int(limits.timeout_s * 1000)}")
        run(f"CREATE SCHEMA {SCHEMA}")
        for name in TABLES:
            run(create_table(name))
            run(create_view(name, {}))
        run("SET GLOBAL lock_configuration = true")

    def apply(self, name: str, batch: pa.Table, user_columns: dict[str, str]) -> None:
        """Upsert changed rows by key, and show the user columns that there are now."""
        batch = check_batch(name, batch)
        run = self._connection.execute
        self._connection.register("incoming", batch)
        run("BEGIN TRANSACTION")
        replaced = 0
        if self._live[name]:
            where = 'WHERE "key" IN (SELECT "key" FROM incoming)'
            replaced = int(run(f'DELETE FROM {SCHEMA}."{name}" {where}').fetchall()[0][0])
        run(insert(name, "incoming")).fetchall()
        if user_columns != self._shown[name]:
            run(create_view(name, user_columns))
        run("COMMIT")
        self._connection.unregister("incoming")
        self._shown[name] = user_columns
        self._live[name] += batch.num_rows - replaced
        self._dead[name] += replaced
        if self._dead[name] > DEAD_ROWS_MAX + self._live[name]:
            self._rewrite(name)

    def lend(self, name: str, table: pa.Table) -> None:
        """Show a table to the next query."""
        self._lent[name] = table

    def query(self, text: str) -> pa.Table:
        """The result of one statement that only reads.

        Raises:
            InvalidQuery: it is not one such statement, or DuckDB refuses it.
            QueryKilled: the result is larger than the limits allow.
        """
        lent, self._lent = self._lent, {}
        self._check(text)
        # A connection of its own: whatever a query leaves behind goes with it.
        with self._connection.cursor() as connection:
            for name, table in lent.items():
                connection.register(name, table)
            connection.execute("BEGIN TRANSACTION READ ONLY")
            return self._collect(connection.sql(text))

    def close(self) -> None:
        self._connection.close()

    def _check(self, text: str) -> None:
        statements = self._connection.extract_statements(text)
        if len(statements) != 1:
            raise InvalidQuery(f"SQL: expected one statement, got {len(statements)}")
        if statements[0].named_parameters:
            raise InvalidQuery("SQL: parameters are not supported; write the values into the query")
        kind = statements[0].type
        explained = split_explain(text) if kind == duckdb.StatementType.EXPLAIN else None
        if kind != duckdb.StatementType.SELECT and explained is None:
            hint = " (a PIVOT needs its values: ON column IN (...))" if kind.name == "MULTI" else ""
            raise InvalidQuery(f"SQL: {kind.name} is not allowed; only SELECT is{hint}")
        serialize = self._connection.execute("SELECT json_serialize_sql(?)", [explained or text])
        check_tree(str(serialize.fetchall()[0][0]))

    def _collect(self, relation: duckdb.DuckDBPyRelation) -> pa.Table:
        reader = relation.to_arrow_reader(BATCH_ROWS)
        batches, size, rows = [], 0, 0
        with reader:
            for batch in reader:
                batches.append(batch)
                size, rows = size + batch.nbytes, rows + batch.num_rows
                if size > self._limits.result_bytes_max or rows > self._limits.rows_max:
                    raise QueryKilled(
                        f"SQL: the result passed {self._limits.result_bytes_max} bytes (result_bytes_max) or "
                        f"{self._limits.rows_max} rows (rows_max); select less, or add a LIMIT"
                    )
            return pa.Table.from_batches(batches, schema=reader.schema)

    def _rewrite(self, name: str) -> None:
        """Write a table anew without its replaced rows, which an in-memory database keeps."""
        run = self._connection.execute
        run("BEGIN TRANSACTION")
        run(f'DROP VIEW "{name}"')
        run(f'ALTER TABLE {SCHEMA}."{name}" RENAME TO "{name}_old"')
        run(create_table(name))
        run(insert(name, f'{SCHEMA}."{name}_old"')).fetchall()
        run(f'DROP TABLE {SCHEMA}."{name}_old"')
        run(create_view(name, self._shown[name]))
        run("COMMIT")
        self._dead[name] = 0


class Worker:
    """Answers requests one after the other until its parent is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requests: queue.Queue[Frame] = queue.Queue(maxsize=1)
        self._scopes: dict[str | None, Scope] = {}
        self._limits = SqlLimits()

    def serve(self) -> NoReturn:
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        while True:
            request = self._requests.get()
            self._channel.send(self._answer(request))

    def _read(self) -> None:
        """Receive requests; leave at once when the parent does, also in the middle of a query."""
        parent = os.getppid()
        try:
            while os.getppid() == parent:
                ready, _, _ = select.select([self._channel.socket], [], [], PARENT_CHECK_S)
                if ready:
                    self._requests.put(self._channel.receive())
        except (EOFError, OSError):
            pass  # the parent closed its end or died: the same as a changed parent
        os._exit(0)

    def _answer(self, request: Frame) -> Frame:
        try:
            return self._dispatch(request)
        except ArrowTQError as error:
            return Frame({"error": error.to_wire()})
        except (duckdb.OutOfMemoryException, MemoryError, pa.ArrowMemoryError):
            bound = f"{self._limits.memory_bytes} bytes (memory_bytes)"
            killed = QueryKilled(f"SQL: the query and the tables it reads need more than {bound}")
            return Frame({"error": killed.to_wire(), "restart": True})
        except duckdb.InterruptException:
            return Frame({"error": out_of_time(self._limits).to_wire()})
        except (duckdb.FatalException, duckdb.InternalException):
            return self._fault()
        except (duckdb.Error, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            if request.header.get("op") != "query":
                return self._fault()
            return Frame({"error": InvalidQuery(f"SQL: {shorten(str(error))}").to_wire()})
        except Exception:
            return self._fault()

    def _fault(self) -> Frame:
        """Tell the log what happened and the parent to start another worker."""
        traceback.print_exc(file=sys.stderr)
        fault = InternalError("SQL: the worker failed; the log of the process has the traceback")
        return Frame({"error": fault.to_wire(), "restart": True})

    def _dispatch(self, request: Frame) -> Frame:
        header = request.header
        scope = header.get("scope")
        assert scope is None or isinstance(scope, str)
        match header["op"]:
            case "start":
                self._start(header["limits"])
                return Frame({"pid": os.getpid()})
            case "apply":
                columns = header["user_columns"]
                assert isinstance(columns, dict)
                self._scope(scope).apply(str(header["table"]), request.table(), columns)
                return Frame({})
            case "query":
                return table_frame({}, self._scope(scope).query(str(header["query"])))
            case "lend":
                self._scope(scope).lend(str(header["table"]), request.table())
                return Frame({})
            case "forget":
                if scope in self._scopes:
                    self._scopes.pop(scope).close()
                return Frame({})
            case other:
                raise InternalError(f"SQL worker: unknown request {other!r}")

    def _start(self, limits: object) -> None:
        assert isinstance(limits, dict)
        self._limits = SqlLimits(**limits)
        warm = Scope(self._limits)
        warm.query("SELECT count(*) FROM range(100000)")
        warm.close()
        confine(self._limits)

    def _scope(self, name: str | None) -> Scope:
        if name not in self._scopes:
            self._scopes[name] = Scope(self._limits)
        return self._scopes[name]


def confine(limits: SqlLimits) -> None:
    """Bound what this process may take, from what it has taken to start; no core, no file to write."""
    with open("/proc/self/statm") as file:
        baseline = int(file.read().split()[0]) * resource.getpagesize()
    space = baseline + limits.memory_bytes + limits.scopes_max * SCOPE_OVERHEAD_BYTES
    for kind, bound in (
        (resource.RLIMIT_AS, space),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, FILES_MAX),
    ):
        _, hard = resource.getrlimit(kind)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def out_of_time(limits: SqlLimits) -> QueryKilled:
    """The error of a query that ran too long."""
    return QueryKilled(f"SQL: the query ran longer than {limits.timeout_s} s (timeout_s)")


def shorten(message: str) -> str:
    """DuckDB's message: its first lines."""
    lines = message.strip().splitlines()[:MESSAGE_LINES_MAX]
    return "\n".join(lines)[:MESSAGE_CHARS_MAX].rstrip()


def main() -> NoReturn:
    """Answer the parent process on descriptor 0, for ever."""
    pa.set_cpu_count(1)
    Worker(Channel(socket.socket(fileno=os.dup(0)))).serve()


if __name__ == "__main__":
    main()
