"""Queries over metadata in memory, through a real worker process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from arrow_tq.sql import SqlLimits, SqlService, tables_named
from arrow_tq.testing.metadata import MemoryMetadata
from arrow_tq_schemas.errors import Conflict, InvalidInput, InvalidQuery
from arrow_tq_schemas.tables import TABLES

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def filled() -> MemoryMetadata:
    source = MemoryMetadata()
    for key, run in enumerate(("a", "b"), start=1):
        source.put("runs", key, run=run, epoch=1, created_at=NOON)
        for n in range(2):
            source.put(
                "sessions", key * 10 + n, run=run, session_id=f"{run}-{n}", group_id="g", steps=n, tasks=["t"]
            )
        for n in range(4):
            source.put(
                "segments",
                key * 10 + n,
                run=run,
                segment_id=f"{run}-{n % 2}~{n // 2}",
                session_id=f"{run}-{n % 2}",
                reward=None if n == 3 else n / 4,
                num_tokens=n,
                complete_fields=["token_ids", "logprobs"][: n % 3],
                created_at=NOON,
            )
    return source


@pytest.fixture(scope="module")
def service() -> Iterator[SqlService]:
    service = SqlService(filled(), SqlLimits(timeout_s=10, memory_bytes=256 << 20))
    yield service
    service.close()


@pytest.fixture
def source() -> MemoryMetadata:
    return MemoryMetadata()


@pytest.fixture
def fresh(source: MemoryMetadata) -> Iterator[SqlService]:
    service = SqlService(source, SqlLimits(timeout_s=10, memory_bytes=256 << 20, scopes_max=2))
    yield service
    service.close()


@pytest.mark.parametrize(
    ("query", "run", "expected"),
    [
        ("SELECT avg(reward) AS r FROM segments", "a", [{"r": 0.25}]),
        ("SELECT count(*) AS n FROM segments", None, [{"n": 8}]),
        ("SELECT count(*) AS n FROM segments; ", "b", [{"n": 4}]),
        ("-- comment\nSELECT run FROM Segments GROUP BY 1", "b", [{"run": "b"}]),
        (
            "SELECT session_id, count(*) AS n FROM sessions JOIN segments USING (session_id) "
            "GROUP BY 1 ORDER BY 1",
            "a",
            [{"session_id": "a-0", "n": 2}, {"session_id": "a-1", "n": 2}],
        ),
        (
            "WITH best AS (SELECT max(reward) AS r FROM segments GROUP BY run) SELECT max(r) AS r FROM best",
            None,
            [{"r": 0.5}],
        ),
        (
            "SELECT unnest(complete_fields) AS name, count(*) AS n FROM segments GROUP BY 1 ORDER BY 1",
            "a",
            [{"name": "logprobs", "n": 1}, {"name": "token_ids", "n": 2}],
        ),
        ("SELECT created_at FROM runs", "a", [{"created_at": NOON}]),
        ("SELECT tasks FROM sessions LIMIT 1", "a", [{"tasks": ["t"]}]),
        ("SELECT 1 AS x, NULL AS y", "a", [{"x": 1, "y": None}]),
        ("VALUES (1)", "a", [{"col0": 1}]),
        ("FROM segments SELECT count(*) AS n WHERE reward IS NULL", "a", [{"n": 1}]),
        ("SELECT count(*) AS n FROM range(3)", "a", [{"n": 3}]),
        ("SELECT count(*) AS n FROM segments WHERE reward < 0", "a", [{"n": 0}]),
        (
            "PIVOT segments ON num_tokens IN (1, 2) USING count(*) GROUP BY run",
            "a",
            [{"run": "a", "1": 1, "2": 1}],
        ),
        (
            "SELECT segment_id FROM segments QUALIFY row_number() OVER (ORDER BY num_tokens DESC) = 1",
            "a",
            [{"segment_id": "a-1~1"}],
        ),
    ],
)
def test_answers(service: SqlService, query: str, run: str | None, expected: list[dict[str, object]]) -> None:
    assert service.query(query, run).to_pylist() == expected


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_the_columns_of_the_contract(service: SqlService, table: str) -> None:
    answer = service.query(f"SELECT * FROM {table}", "a")
    assert answer.schema.names == TABLES[table].names
    assert [kind for kind in answer.schema.types if not pa.types.is_list(kind)] == [
        kind for kind in TABLES[table].types if not pa.types.is_list(kind)
    ]


def test_statements_about_tables(service: SqlService) -> None:
    assert service.query("SHOW TABLES", "a")["name"].to_pylist() == sorted(TABLES)
    assert service.query("DESCRIBE segments", "a")["column_name"].to_pylist() == TABLES["segments"].names
    assert service.query("SUMMARIZE segments", "a").num_rows == len(TABLES["segments"].names)
    assert "segments" in service.query("EXPLAIN SELECT * FROM segments", "a")["explain_value"][0].as_py()


def test_a_run_sees_itself_alone(service: SqlService) -> None:
    everything = service.query("SELECT run FROM segments", None)["run"].unique().to_pylist()
    assert sorted(everything) == ["a", "b"]
    for table in ("runs", "sessions", "segments", "_store.segments"):
        assert service.query(f"SELECT DISTINCT run FROM {table}", "a")["run"].to_pylist() == ["a"]
    databases = service.query("SELECT DISTINCT table_catalog AS c FROM information_schema.tables", "a")
    assert databases.num_rows == 1
    assert service.query("SELECT * FROM segments", "nobody").num_rows == 0


def test_user_columns_have_types(fresh: SqlService, source: MemoryMetadata) -> None:
    columns = {"solved": True, "epoch_no": 3, "lr": 0.5, "tag": "é", "extra": {"a": [1]}, "nil": None}
    kinds = {
        "solved": "bool",
        "epoch_no": "int",
        "lr": "float",
        "tag": "text",
        "extra": "json",
        "nil": "json",
    }
    source.put("segments", 1, run="a", segment_id="s", columns=columns)
    source.put("segments", 2, run="a", segment_id="t")
    source.declare("segments", "a", **kinds)
    answer = fresh.query(f"SELECT {', '.join(kinds)} FROM segments ORDER BY segment_id", "a")
    assert answer.schema.types == [
        pa.bool_(),
        pa.int64(),
        pa.float64(),
        pa.string(),
        pa.string(),
        pa.string(),
    ]
    assert answer.to_pylist() == [{**columns, "extra": '{"a": [1]}'.replace(" ", "")}, dict.fromkeys(columns)]
    assert fresh.query("SELECT * FROM segments", "a").schema.names == [
        *TABLES["segments"].names,
        *sorted(kinds),
    ]


def test_a_column_widens(fresh: SqlService, source: MemoryMetadata) -> None:
    query = "SELECT x FROM segments ORDER BY segment_id"
    source.put("segments", 1, run="a", segment_id="1", columns={"x": 1})
    source.declare("segments", "a", x="int")
    assert fresh.query(query, "a").to_pydict() == {"x": [1]}
    source.put("segments", 2, run="a", segment_id="2", columns={"x": 0.5})
    source.declare("segments", "a", x="float")
    assert fresh.query(query, "a").to_pydict() == {"x": [1.0, 0.5]}
    source.put("segments", 3, run="a", segment_id="3", columns={"x": [1, "b"]})
    source.declare("segments", "a", x="json")
    assert fresh.query(query, "a").to_pydict() == {"x": ["1", "0.5", '[1,"b"]']}


def test_columns_that_differ_in_case_are_both_shown(fresh: SqlService, source: MemoryMetadata) -> None:
    source.put("segments", 1, run="a", columns={"lr": 1, "LR": 2})
    source.declare("segments", "a", lr="int", LR="int")
    assert fresh.query("SELECT COLUMNS('(?i)lr.*') FROM segments", "a").to_pylist() == [{"LR": 2, "lr_1": 1}]


def test_hostile_names_and_values_are_data(fresh: SqlService, source: MemoryMetadata) -> None:
    name = "x\"]') FROM runs --'"
    source.put("segments", 1, run="a", columns={"key": "k", "columns": "\\ud800😀"})
    source.put("steps", 1, run="a", messages='["\\ud83d", "x"]')
    source.put("steps", 2, run="a", messages='["y", "\\ud83d\\ude00"]')
    source.declare("segments", "a", key="text", columns="text", **{name: "json"})
    assert fresh.query("SELECT key, columns FROM segments", "a").to_pylist() == [
        {"key": "k", "columns": "\\ud800😀"}
    ]
    # Legal JSON that DuckDB's functions refuse is still shown as it was stored.
    stored = fresh.query("SELECT messages FROM steps ORDER BY messages", "a").column(0).to_pylist()
    assert stored == ['["\\ud83d", "x"]', '["y", "\\ud83d\\ude00"]']
    parsed = fresh.query("SELECT messages->>1 AS m FROM steps WHERE messages LIKE '%y%'", "a")
    assert parsed.to_pylist() == [{"m": "😀"}]
    assert fresh.query("SELECT * FROM segments", "a").schema.names[-1] == name


def test_sees_every_write_before_it(fresh: SqlService, source: MemoryMetadata) -> None:
    for number in range(20):
        source.put("segments", number % 3, run="a", segment_id=str(number % 3), num_tokens=number)
        expected = {n % 3: n for n in range(number + 1)}
        answer = fresh.query("SELECT segment_id, num_tokens FROM segments ORDER BY 1", "a")
        assert answer["num_tokens"].to_pylist() == [expected[key] for key in sorted(expected)]


def test_many_replaced_rows_do_not_pile_up(fresh: SqlService, source: MemoryMetadata) -> None:
    for number in range(3):
        for key in range(5_000):
            source.put("chunks", key, run="a", chunk_id=str(key), rows=number)
        assert fresh.query("SELECT sum(rows) AS n, count(*) AS c FROM chunks", "a").to_pylist() == [
            {"n": number * 5_000, "c": 5_000}
        ]


def test_only_what_changed_is_asked(fresh: SqlService, source: MemoryMetadata) -> None:
    source.put("segments", 1, run="a")
    fresh.query("SELECT * FROM segments", "a")
    fresh.query("SELECT * FROM segments", "a")
    assert source.asked == [("segments", "a", -1)]
    source.put("sessions", 1, run="a")
    fresh.query("SELECT * FROM segments JOIN sessions USING (session_id)", "a")
    assert source.asked[1:] == [("segments", "a", 1), ("sessions", "a", -1)]


def test_scopes_are_forgotten_oldest_first(fresh: SqlService, source: MemoryMetadata) -> None:
    for run in ("a", "b", "c"):
        source.put("segments", ord(run), run=run)
    for run in ("a", "b", "a", "c", "a", "b"):
        assert fresh.query("SELECT run FROM segments", run)["run"].to_pylist() == [run]
    assert [run for _, run, _ in source.asked] == ["a", "b", "c", "b"]


@pytest.mark.parametrize(
    ("query", "tables"),
    [
        ("SELECT * FROM SEGMENTS", ["segments"]),
        ('SELECT * FROM "runs", steps', ["steps", "runs"]),
        ("SELECT blob_id FROM step_blobs", ["step_blobs", "blobs"]),
        (
            "SELECT 1",
            [
                *(
                    "bundles",
                    "spans",
                    "chunks",
                    "claims",
                    "segments",
                    "step_blobs",
                    "blobs",
                    "steps",
                    "sessions",
                ),
                *("marks", "runs"),
            ],
        ),
    ],
)
def test_tables_named(query: str, tables: list[str]) -> None:
    assert tables_named(query) == tables


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "expected one statement, got 0"),
        ("-- nothing", "expected one statement, got 0"),
        ("SELECT 1; SELECT 2", "expected one statement, got 2"),
        ("SELEC 1", 'Parser Error: syntax error at or near "SELEC"'),
        ("SELECT * FROM nope", "Table with name nope does not exist"),
        ("SELECT nope FROM segments", 'column "nope" not found'),
        ("SELECT error('boom')", "boom"),
        ("SELECT CAST(segment_id AS INT) FROM segments", "Could not convert string 'a-0~0'"),
        ("SELECT ?", "parameters are not supported"),
        ("SELECT $name", "parameters are not supported"),
        ("SELECT '\x00'", "NUL at 8"),
        ("SELECT '\ud800'", "a lone surrogate at 8"),
        ("SELECT " + "x" * 200_000, "131072 at most"),
        ("PIVOT segments ON view USING count(*)", "a PIVOT needs its values"),
    ],
)
def test_mistakes_are_explained(service: SqlService, query: str, message: str) -> None:
    with pytest.raises(InvalidQuery, match=message) as caught:
        service.query(query, "a")
    text = str(caught.value)
    assert "Traceback" not in text and ".py" not in text and len(text) < 1_100
    assert service.query("SELECT 1 AS x", "a").to_pylist() == [{"x": 1}]


def test_queries_of_many_threads(service: SqlService) -> None:
    answers: list[int] = []

    def ask(run: str) -> None:
        for _ in range(5):
            answers.extend(service.query("SELECT count(*) AS n FROM segments", run)["n"].to_pylist())

    threads = [threading.Thread(target=ask, args=(run,)) for run in ("a", "b", "a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [4] * 20


def test_a_closed_service_says_so(source: MemoryMetadata) -> None:
    service = SqlService(source, SqlLimits())
    service.close()
    service.close()
    with pytest.raises(Conflict, match="was closed"):
        service.query("SELECT 1", None)


def test_limits_are_checked() -> None:
    with pytest.raises(InvalidInput, match="timeout_s 0: expected more than 0"):
        SqlLimits(timeout_s=0)
    with pytest.raises(InvalidInput, match="result_bytes_max"):
        SqlLimits(result_bytes_max=1 << 40)
