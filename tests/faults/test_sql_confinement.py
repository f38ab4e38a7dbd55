"""What a query must not reach: files, settings, other runs, memory and time beyond its bounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from arrow_tq.sql import SqlLimits, SqlService
from arrow_tq.testing.metadata import MemoryMetadata
from arrow_tq_schemas.errors import InvalidQuery, QueryKilled

SECRET = "the-secret-of-another-run"


@pytest.fixture(scope="module")
def service() -> Iterator[SqlService]:
    source = MemoryMetadata()
    source.put("segments", 1, run="mine", segment_id="s")
    source.put("segments", 2, run="other", segment_id=SECRET)
    service = SqlService(source, SqlLimits(timeout_s=1, memory_bytes=256 << 20, result_bytes_max=8 << 20))
    service.query(f"SELECT * FROM segments WHERE segment_id = '{SECRET}'", None)
    yield service
    service.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("outside") / "private.csv"
    file.write_text("password\nhunter2\n")
    return file


READS = [
    "SELECT * FROM '{file}'",
    "SELECT * FROM read_csv('{file}')",
    "SELECT * FROM read_csv_auto('{file}')",
    "SELECT * FROM read_text('{file}')",
    "SELECT * FROM read_blob('{file}')",
    "SELECT * FROM read_json('{file}')",
    "SELECT * FROM read_parquet('{file}')",
    "SELECT * FROM parquet_metadata('{file}')",
    "SELECT * FROM sniff_csv('{file}')",
    "SELECT * FROM glob('{file}')",
    "FROM segments, read_csv('{file}')",
    "WITH x AS (SELECT * FROM read_text('{file}')) SELECT * FROM x",
    "SELECT (SELECT content FROM read_text('{file}'))",
    "SELECT * FROM \"read_csv\"('{file}')",
    "SELECT * FROM READ_CSV/**/('{file}')",
    "SELECT * FROM query('SELECT * FROM read_csv(''{file}'')')",
    "SELECT * FROM query_table('{file}')",
    "EXPLAIN ANALYZE SELECT * FROM read_text('{file}')",
    "DESCRIBE SELECT * FROM read_csv('{file}')",
    "SUMMARIZE SELECT * FROM read_csv('{file}')",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''{file}'')'))",
    "SELECT getenv('HOME')",
    "SELECT current_setting('home_directory')",
]
CHANGES = [
    "COPY segments TO '{file}'",
    "COPY (SELECT 1) TO '{file}'",
    "EXPORT DATABASE '{file}'",
    "ATTACH '{file}' AS x",
    "ATTACH ':memory:' AS x",
    "INSTALL httpfs",
    "LOAD '{file}'",
    "SET threads = 1",
    "RESET threads",
    "SET VARIABLE x = 1",
    "PRAGMA enable_profiling",
    "CALL enable_logging()",
    "USE memory",
    "CHECKPOINT",
    "CREATE TABLE x (a INT)",
    "CREATE TEMP TABLE x (a INT)",
    "CREATE MACRO x() AS 1",
    "CREATE SECRET (TYPE http)",
    "DROP TABLE _store.segments",
    "DROP VIEW segments",
    "INSERT INTO _store.segments (key) VALUES (7)",
    "UPDATE _store.segments SET run = 'x'",
    "DELETE FROM _store.segments",
    "TRUNCATE _store.segments",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "VACUUM",
    "PREPARE x AS SELECT 1",
    "EXECUTE x",
    "SELECT 1; DROP VIEW segments",
    "WITH x AS (INSERT INTO _store.segments (key) VALUES (7) RETURNING key) SELECT * FROM x",
    "WITH x AS (DELETE FROM _store.segments RETURNING key) SELECT * FROM x",
    "EXPLAIN ANALYZE INSERT INTO _store.segments (key) VALUES (7)",
    "EXPLAIN ANALYZE COPY segments TO '{file}'",
    "EXPLAIN ANALYZE CREATE TABLE x (a INT)",
    "SELECT * FROM enable_profiling()",
    "SELECT * FROM enable_logging()",
    "SELECT * FROM checkpoint()",
    "SELECT * FROM copy_database('a', 'b')",
    "SELECT * FROM add_grammar_extension('x')",
    "SELECT * FROM register_external_resource('x')",
    "SELECT write_log('x')",
]
INTERNALS = [
    "SELECT * FROM duckdb_settings()",
    "FROM duckdb_settings",
    "SELECT * FROM duckdb_databases()",
    "SELECT * FROM duckdb_databases",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM duckdb_extensions()",
    "SELECT * FROM duckdb_logs()",
    "SELECT * FROM duckdb_temporary_files()",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_user_agent()",
    "SELECT * FROM arrow_scan(1, 2, 3)",
    "SELECT * FROM arrow_scan_dumb(1, 2, 3)",
    "SELECT * FROM pandas_scan(1)",
    "SELECT * FROM python_arrow_scan(1)",
    "SELECT * FROM python_map_function(1)",
    "SELECT * FROM seq_scan('segments')",
]


@pytest.mark.parametrize("query", [*READS, *CHANGES, *INTERNALS])
def test_is_refused(service: SqlService, outside: Path, query: str) -> None:
    before = sorted(outside.parent.iterdir())
    with pytest.raises(InvalidQuery) as caught:
        service.query(query.replace("{file}", str(outside)), "mine")
    assert "hunter2" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert sorted(outside.parent.iterdir()) == before and outside.read_text() == "password\nhunter2\n"
    assert service.query("SELECT segment_id FROM segments", "mine")["segment_id"].to_pylist() == ["s"]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM information_schema.tables",
        "SELECT * FROM information_schema.columns",
        "SELECT * FROM pg_catalog.pg_tables",
        "SELECT * FROM pg_catalog.pg_settings",
        "SELECT * FROM duckdb_tables()",
        "SELECT * FROM duckdb_views()",
        "SELECT * FROM duckdb_columns()",
        "SELECT function_name FROM duckdb_functions()",
        "SELECT * FROM memory._store.segments",
        "SELECT * FROM temp.segments",
        "SHOW ALL TABLES",
        "SHOW DATABASES",
        "SELECT * FROM other.segments",
        "SUMMARIZE segments",
    ],
)
def test_shows_neither_other_runs_nor_paths(service: SqlService, query: str) -> None:
    try:
        shown = str(service.query(query, "mine").to_pylist())
    except InvalidQuery as error:
        shown = str(error)
    assert SECRET not in shown
    assert not any(path in shown for path in (str(Path.home()) + "/", "site-packages", "/proc", "arrow_tq/"))


@pytest.mark.parametrize(
    "query",
    [
        "SELECT repeat('x', 4000000000)",
        "SELECT len(repeat('x', 4000000000))",
        "SELECT len(range(1000000000))",
        "SELECT list(range) FROM range(1000000000)",
        "SELECT string_agg(repeat('x', 1000000), '') FROM range(10000)",
    ],
)
def test_memory_is_bounded(service: SqlService, query: str) -> None:
    with pytest.raises(QueryKilled, match=r"268435456 bytes \(memory_bytes\)|1 s \(timeout_s\)|was stopped"):
        service.query(query, "mine")
    assert service.query("SELECT count(*) AS n FROM segments", "mine").to_pylist() == [{"n": 1}]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM range(1000000000000) WHERE range % 7 = 3",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
        "SELECT count(*) FROM range(100000) a, range(100000) b, range(900) c WHERE a.range * b.range = 7",
    ],
)
def test_time_is_bounded(service: SqlService, query: str) -> None:
    start = time.monotonic()
    with pytest.raises(QueryKilled):
        service.query(query, "mine")
    assert time.monotonic() - start < 5
    assert service.query("SELECT count(*) AS n FROM segments", "mine").to_pylist() == [{"n": 1}]


def test_what_duckdb_cannot_interrupt_is_killed(service: SqlService) -> None:
    start = time.monotonic()
    with pytest.raises(QueryKilled, match="the worker was stopped: running the query took longer"):
        service.query("SELECT levenshtein(repeat('a', 1000000), repeat('b', 1000000))", "mine")
    assert time.monotonic() - start < 5
    assert service.query("SELECT count(*) AS n FROM segments", "mine").to_pylist() == [{"n": 1}]


def test_the_result_is_bounded(service: SqlService) -> None:
    with pytest.raises(QueryKilled, match=r"passed 8388608 bytes \(result_bytes_max\)"):
        service.query("SELECT * FROM range(100000000)", "mine")
    assert service.query("SELECT count(*) AS n FROM segments", "mine").to_pylist() == [{"n": 1}]


def test_nesting_is_bounded(service: SqlService) -> None:
    for query in ("SELECT " + "(" * 20_000 + "1" + ")" * 20_000, "SELECT " + "1 + " * 30_000 + "1"):
        with pytest.raises((InvalidQuery, QueryKilled)):
            service.query(query, "mine")
        assert service.query("SELECT 1 AS x", "mine").to_pylist() == [{"x": 1}]
