from __future__ import annotations

import apsw
import pytest

from arrow_tq.store import where
from arrow_tq.store.where import Column, compile_order_by, compile_where
from arrow_tq_schemas.errors import InvalidQuery

COLUMNS = {
    "segment_id": Column("segments.segment_id", "text"),
    "reward": Column("segments.reward", "float"),
    "num_tokens": Column("segments.num_tokens", "int"),
    "complete_fields": Column("segments.complete_fields", "list"),
    "solved": Column("json_extract(segments.columns, '$.solved')", "bool"),
    "lr": Column("json_extract(segments.columns, '$.lr')", "float"),
    "extra": Column("json_extract(segments.columns, '$.extra')", "json"),
    "Lr2": Column("json_extract(segments.columns, '$.Lr2')", "int"),
    "lR2": Column("json_extract(segments.columns, '$.lR2')", "int"),
}
ROWS = [
    ("a~0", 0.5, 10, '["token_ids","logprobs"]', '{"solved": true, "lr": 0.25}'),
    ("B%~0", None, 7, "[]", '{"solved": false, "extra": {"x": 1}}'),
    ("b_*[~0", 1.0, -7, None, '{"extra": null}'),
]


@pytest.fixture(scope="module")
def segments() -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.execute(
        "CREATE TABLE segments "
        "(segment_id TEXT, reward REAL, num_tokens INT, complete_fields TEXT, columns TEXT)"
    )
    connection.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?)", ROWS)
    return connection


def select(segments: apsw.Connection, text: str) -> list[str]:
    sql, values = compile_where(text, COLUMNS)
    rows = segments.execute(f"SELECT segment_id FROM segments WHERE {sql} ORDER BY rowid", values)
    return [row[0] for row in rows]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward IS NOT NULL AND num_tokens < 4096", ["a~0", "b_*[~0"]),
        ("REWARD IS NULL", ["B%~0"]),
        ("segments.reward >= 0.5", ["a~0", "b_*[~0"]),
        ("num_tokens / 2 = 3.5", ["B%~0"]),
        ("num_tokens % 4 = -3", ["b_*[~0"]),
        ("segment_id LIKE 'b%'", ["b_*[~0"]),
        ("segment_id LIKE '_!%%' ESCAPE '!'", ["B%~0"]),
        ("segment_id NOT LIKE 'b!_%' ESCAPE '!'", ["a~0", "B%~0"]),
        ("segment_id LIKE '%*[%'", ["b_*[~0"]),
        ("segment_id IN ('a~0', 'x')", ["a~0"]),
        ("num_tokens NOT IN (10, -7)", ["B%~0"]),
        ("num_tokens BETWEEN -7 AND 7", ["B%~0", "b_*[~0"]),
        ("solved", ["a~0"]),
        ("NOT solved", ["B%~0"]),
        ("solved IS NOT TRUE", ["B%~0", "b_*[~0"]),
        ("solved = FALSE OR lr < 1", ["a~0", "B%~0"]),
        ("extra IS NOT NULL", ["B%~0"]),
        ("list_contains(complete_fields, 'logprobs')", ["a~0"]),
        ("NOT list_contains(complete_fields, 'logprobs')", ["B%~0"]),
        ("coalesce(reward, -1) < 0 AND abs(num_tokens) = 7", ["B%~0"]),
        ("length(segment_id) = 3", ["a~0"]),
        ("-num_tokens > 0", ["b_*[~0"]),
        ("num_tokens > -9223372036854775808", ["a~0", "B%~0", "b_*[~0"]),
        ("num_tokens / 0 IS NULL", ["a~0", "B%~0", "b_*[~0"]),
    ],
)
def test_selects_what_duckdb_would(segments: apsw.Connection, text: str, expected: list[str]) -> None:
    assert select(segments, text) == expected


def test_every_literal_is_bound() -> None:
    sql, values = compile_where("segment_id = 'x'' OR 1=1 --' AND reward > 0.5 AND solved = TRUE", COLUMNS)
    assert values == ["x' OR 1=1 --", 0.5, 1]
    assert "1=1" not in sql and "0.5" not in sql and sql.count("?") == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "where: empty"),
        ("  ", "where: empty"),
        ("reward >", "does not parse"),
        ("reward = 1; DROP TABLE segments", "does not parse"),
        ("reward = 1 ORDER BY reward", "does not parse"),
        ("reward = 1) OR (1 = 1", "does not parse"),
        ("reward = 1 -- more", "comments are not allowed"),
        ("reward = /* x */ 1", "comments are not allowed"),
        ("nope = 1", "'nope': unknown column; there are Lr2, complete_fields, extra,"),
        ("LR2 = 1", "more than one column is called so; there are Lr2, lR2"),
        ("other.reward = 1", "expected a column's name alone"),
        ("reward = ?", "'[?]': not allowed; expected AND, OR"),
        ("reward = $1", "not allowed"),
        ("reward = :x", "not allowed"),
        ("reward IN (SELECT 1)", "query is not allowed here"),
        ("EXISTS (SELECT 1)", "not allowed"),
        ("reward = (SELECT 1)", "not allowed"),
        ("reward IN ()", "expected a list of literals"),
        ("reward IN (num_tokens)", "'num_tokens': expected a literal"),
        ("random() > 0.5", "not allowed"),
        ("lower(segment_id) = 'a'", "not allowed"),
        ("load_extension('x') IS NULL", "not allowed"),
        ("segment_id || 'x' = 'y'", "not allowed"),
        ("CAST(reward AS TEXT) = '1'", "not allowed"),
        ("reward = '1'", "a float and text cannot be compared"),
        ("segment_id = 1", "an integer and text cannot be compared"),
        ("solved = 1", "a condition and an integer cannot be compared"),
        ("extra = 1", "json cannot be compared; use IS NULL"),
        ("complete_fields = 'x'", "list cannot be compared; use list_contains"),
        ("reward", "expected a condition, got a float"),
        ("reward AND solved", "'reward': expected a condition, got a float"),
        ("NOT num_tokens", "expected a condition, got an integer"),
        ("segment_id + 1 = 2", "expected a number, got text"),
        ("reward % 2 = 1", "% works on integers"),
        ("length(reward) = 1", "expected text, got a float"),
        ("num_tokens LIKE '1%'", "expected text, got an integer"),
        ("segment_id LIKE segment_id", "expected a pattern in quotes"),
        ("segment_id LIKE 'x!' ESCAPE '!'", "ends with its escape character"),
        ("segment_id ILIKE 'x'", "not allowed"),
        ("solved = solved = solved", "put parentheses around a condition"),
        ("1 < num_tokens < 3", "put parentheses around a condition"),
        ("num_tokens = 9223372036854775808", "integers have 64 bits"),
        ("reward < 1e999", "larger than a float can be"),
        ("list_contains(segment_id, 'x')", "expected list_contains"),
        ("reward = 1\x00", "NUL at 10"),
        ("segment_id = '\ud800'", "a lone surrogate at 14"),
        ("(reward, 1) = (1, 1)", "not allowed"),
        ("CASE WHEN solved THEN 1 END = 1", "not allowed"),
        ("reward COLLATE NOCASE = 1", "not allowed"),
        ("segment_id = $$x$$", "not allowed"),
    ],
)
def test_refuses_and_names_the_part(text: str, message: str) -> None:
    with pytest.raises(InvalidQuery, match=message):
        compile_where(text, COLUMNS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 40 + "solved" + ")" * 40, "more than 32 operators"),
        ("(" * 4000 + "solved" + ")" * 4000, "words and signs, 2000 at most"),
        ("(" * 900 + "solved" + ")" * 900, "more than 32 operators"),
        ("NOT " * 500 + "solved", "more than 32 operators"),
        ("- " * 900 + "reward > 0", "more than 32 operators"),
        ("num_tokens = 1" + " + 1" * 400, "more than 32 operators"),
        (f"segment_id = '{'x' * 16_400}'", "bytes, 16384 at most"),
        (f"segment_id LIKE '{'%a' * 17}'", "17 % in one pattern, 16 at most"),
    ],
)
def test_bounds(text: str, message: str) -> None:
    with pytest.raises(InvalidQuery, match=message):
        compile_where(text, COLUMNS)


def test_long_chains_are_within_bounds(segments: apsw.Connection) -> None:
    text = " OR ".join(f"num_tokens = {number}" for number in range(400))
    assert select(segments, text) == ["a~0", "B%~0"]


def test_the_bounds_are_below_those_of_sqlite() -> None:
    assert where.compile_where("solved" + " AND solved" * 900, COLUMNS)[0].count("AND") == 900


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward", ["a~0", "b_*[~0", "B%~0"]),
        ("reward DESC", ["b_*[~0", "a~0", "B%~0"]),
        ("reward ASC NULLS FIRST", ["B%~0", "a~0", "b_*[~0"]),
        ("Num_Tokens, segment_id DESC", ["b_*[~0", "B%~0", "a~0"]),
    ],
)
def test_order_by(segments: apsw.Connection, text: str, expected: list[str]) -> None:
    rows = segments.execute(f"SELECT segment_id FROM segments ORDER BY {compile_order_by(text, COLUMNS)}")
    assert [row[0] for row in rows] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "order_by: empty"),
        ("1", "expected a column"),
        ("reward + 1", "expected a column"),
        ("random()", "expected a column"),
        ("reward; DROP TABLE x", "does not parse"),
        ("reward LIMIT 1", "does not parse"),
        ("nope", "unknown column; there are"),
        ("complete_fields", "a list column has no order"),
        ("reward -- x", "comments are not allowed"),
        ("(SELECT 1)", "expected a column"),
    ],
)
def test_order_by_refuses(text: str, message: str) -> None:
    with pytest.raises(InvalidQuery, match=message):
        compile_order_by(text, COLUMNS)
