from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from arrow_tq.sql_format import ROWS_SHOWN_MAX, Kind, format_table
from arrow_tq_schemas.errors import InvalidInput

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def text_of(table: pa.Table, kind: Kind, width: int | None = None) -> str:
    stream = io.StringIO()
    format_table(table, stream, kind, width=width)
    return stream.getvalue()


def test_table() -> None:
    table = pa.table({"name": ["a", None], "n": [1, 200], "ok": [True, None]})
    assert text_of(table, "table").splitlines() == [
        "+------+-----+------+",
        "| name |   n | ok   |",
        "+------+-----+------+",
        "| a    |   1 | true |",
        "| NULL | 200 | NULL |",
        "+------+-----+------+",
        "(2 rows)",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.42000000000000004, "0.42"),
        (0.0, "0"),
        (-0.5, "-0.5"),
        (1 / 3, "0.333333"),
        (1234.5678, "1234.57"),
        (123456789.123, "123456789.1"),
        (20000000.0, "20000000"),
        (1e-9, "1e-09"),
        (1e300, "1e+300"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_floats_are_plain(value: float, shown: str) -> None:
    assert text_of(pa.table({"avg(reward)": [value]}), "table").splitlines()[3] == f"| {shown:>11} |"


def test_long_text_is_cut_to_the_width_and_numbers_are_not() -> None:
    table = pa.table({"id": [10**15], "text": ["x" * 150], "more": ["y" * 40]})
    lines = text_of(table, "table", width=60).splitlines()
    assert {len(line) for line in lines[:-1]} == {60}
    assert str(10**15) in lines[3] and lines[3].count("…") == 2


def test_many_columns_become_lines() -> None:
    table = pa.table({f"column_{n}": [n, n] for n in range(20)} | {"text": ["é" * 300, None]})
    lines = text_of(table, "table", width=40).splitlines()
    assert lines[0] == "-- row 1 --" and lines[1] == "column_0  | 0"
    assert max(map(len, lines)) <= 40 and lines[21].endswith("…") and lines[-1] == "(2 rows)"


def test_a_terminal_cannot_be_steered() -> None:
    shown = text_of(
        pa.table(
            {
                "a\x1b[2J": [
                    "x\x1b[31m\n\x9b\u202e",
                ]
            }
        ),
        "table",
    )
    assert "\x1b" not in shown and "\x9b" not in shown and "x\\x1b[31m\\n" in shown
    assert "[bold]" in text_of(pa.table({"a": ["[bold]x[/bold]"]}), "table")


def test_many_rows_are_cut_and_counted() -> None:
    lines = text_of(pa.table({"n": range(ROWS_SHOWN_MAX + 5)}), "table").splitlines()
    assert len(lines) == ROWS_SHOWN_MAX + 5
    assert lines[-1] == f"({ROWS_SHOWN_MAX + 5} rows, the first {ROWS_SHOWN_MAX} shown)"


TYPED = pa.table(
    {
        "s": pa.array(['a,"b"\r\n', None, ""]),
        "x": pa.array([0.1 + 0.2, float("nan"), None]),
        "n": pa.array([1, None, -(2**63)], pa.int64()),
        "b": pa.array([True, False, None]),
        "t": pa.array([NOON, None, NOON], pa.timestamp("us", "UTC")),
        "l": pa.array([["a"], [], None]),
        "d": pa.array([Decimal("12345678901234567890"), None, Decimal(0)], pa.decimal128(38, 0)),
    }
)


def test_csv() -> None:
    text = text_of(TYPED, "csv")
    assert text.startswith("s,x,n,b,t,l,d\r\n") and text.endswith("\r\n")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[1] == [
        'a,"b"\r\n', "0.30000000000000004", "1", "true", "2026-01-01T12:00:00+00:00", '["a"]',
        "12345678901234567890",
    ]  # fmt: skip
    assert rows[2] == ["", "nan", "", "false", "", "[]", ""]
    assert rows[3] == ["", "", str(-(2**63)), "", "2026-01-01T12:00:00+00:00", "", "0"]


def test_json() -> None:
    records = json.loads(text_of(TYPED, "json"))
    assert records == [
        {"s": 'a,"b"\r\n', "x": 0.1 + 0.2, "n": 1, "b": True, "t": "2026-01-01T12:00:00+00:00", "l": ["a"],
         "d": 12345678901234567890},
        {"s": None, "x": None, "n": None, "b": False, "t": None, "l": [], "d": None},
        {"s": "", "x": None, "n": -(2**63), "b": None, "t": "2026-01-01T12:00:00+00:00", "l": None, "d": 0},
    ]  # fmt: skip


def test_json_of_equal_names_and_of_nothing() -> None:
    assert json.loads(text_of(pa.table([[1], [2]], names=["a", "a"]), "json")) == [{"a": 1, "a_1": 2}]
    assert json.loads(text_of(TYPED.slice(0, 0), "json")) == []
    assert text_of(TYPED.slice(0, 0), "csv") == "s,x,n,b,t,l,d\r\n"
    assert text_of(TYPED.slice(0, 0), "table").endswith("(0 rows)\n")


def test_another_format_is_refused() -> None:
    with pytest.raises(InvalidInput, match="format 'xml': expected table, csv or json"):
        text_of(TYPED, "xml")  # type: ignore[arg-type]
