"""Query results for people and their tools: a table in the terminal, CSV, or JSON."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Literal, TextIO

import pyarrow as pa
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arrow_tq_schemas.errors import InvalidInput

Kind = Literal["table", "csv", "json"]
FLOAT_DIGITS = 6
"""Significant digits of a float in the terminal; CSV and JSON have all of them."""
ROWS_SHOWN_MAX = 1_000
"""Rows of a table in the terminal; CSV and JSON have all of them."""
CELL_CHARS_MAX = 200
"""Characters of one value in the terminal."""
TEXT_CHARS_MIN = 8
"""A column of text is not made narrower than this: then each value has a line of its own."""
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_CONTROL |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def format_table(table: pa.Table, stream: TextIO, kind: Kind, width: int | None = None) -> None:
    """Write ``table`` to ``stream``.

    Args:
        kind: ``table`` for people (numbers right-aligned, long text cut, a line with the row count),
            ``csv`` (RFC 4180 with a header; NULL is empty, lists and structs are JSON), ``json`` (an
            array of objects; NaN and infinities are null, times ISO 8601).
        width: columns of the terminal for ``table``; None asks the terminal, and is no bound where the
            stream is not one.

    Raises:
        InvalidInput: another ``kind``.
    """
    if kind == "table":
        _write_table(table, stream, width)
    elif kind == "csv":
        _write_csv(table, stream)
    elif kind == "json":
        _write_json(table, stream)
    else:
        raise InvalidInput(f"format {kind!r}: expected table, csv or json")


# -- table -------------------------------------------------------------------------------------------


def _write_table(table: pa.Table, stream: TextIO, width: int | None) -> None:
    names = [_printable(name) for name in table.column_names]
    cells = [[_cell(value) for value in row] for row in _rows(table.slice(0, ROWS_SHOWN_MAX))]
    right = [_is_number(field.type) for field in table.schema]
    if width is None and stream.isatty():
        width = shutil.get_terminal_size().columns
    widths = _widths(names, cells, right, width)
    if widths is None:
        _write_records(names, cells, stream, width)
    else:
        _write_grid(names, cells, right, widths, stream)
    word = "row" if table.num_rows == 1 else "rows"
    more = f", the first {ROWS_SHOWN_MAX} shown" if table.num_rows > ROWS_SHOWN_MAX else ""
    stream.write(f"({table.num_rows} {word}{more})\n")


def _widths(
    names: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], width: int | None
) -> list[int] | None:
    """Width of each column: text gives way, the longest first, numbers never. None: it cannot fit."""
    natural = [max([cell_len(name), *(cell_len(row[i]) for row in cells)]) for i, name in enumerate(names)]
    if width is None:
        return natural
    room = width - 1 - 3 * len(names)
    for bound in range(max(natural, default=0), TEXT_CHARS_MIN - 1, -1):
        widths = [size if number else min(size, bound) for size, number in zip(natural, right, strict=True)]
        if sum(widths) <= room:
            return widths
    return None


def _write_grid(
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
    widths: Sequence[int],
    stream: TextIO,
) -> None:
    grid = Table(box=box.ROUNDED if stream.isatty() else box.ASCII2, header_style="bold")
    for name, number, size in zip(names, right, widths, strict=True):
        grid.add_column(
            Text(name), justify="right" if number else "left", width=size, no_wrap=True, overflow="ellipsis"
        )
    for row in cells:
        grid.add_row(*(Text(text, style="dim" if text == "NULL" else "") for text in row))
    Console(file=stream, width=sum(widths) + 3 * len(widths) + 1, highlight=False).print(grid)


def _write_records(
    names: Sequence[str], cells: Sequence[Sequence[str]], stream: TextIO, width: int | None
) -> None:
    """A line a value, for results with more columns than the terminal has room for."""
    longest = max(cell_len(name) for name in names)
    room = max((width or 0) - longest - 3, TEXT_CHARS_MIN)
    for number, row in enumerate(cells, start=1):
        stream.write(f"-- row {number} --\n")
        for name, text in zip(names, row, strict=True):
            shown = Text(text)
            shown.truncate(room, overflow="ellipsis")
            stream.write(f"{name}{' ' * (longest - cell_len(name))} | {shown.plain}\n")


def _cell(value: object) -> str:
    """One value as people read it."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, datetime):
        return _when(value)
    if isinstance(value, list | dict):
        return _printable(json.dumps(_plain(value), ensure_ascii=False))
    if isinstance(value, bytes):
        return _printable(value.hex())
    return _printable(str(value))


def _float(value: float) -> str:
    """``0.42`` for 0.42000000000000004: short, never in a notation that hides the size."""
    if not math.isfinite(value):
        return str(value)
    if 10 ** (FLOAT_DIGITS - 1) <= abs(value) < 1e15:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.{FLOAT_DIGITS}g}"


def _when(value: datetime) -> str:
    """Seconds, and their fraction where there is one; UTC is what all of our times are."""
    text = value.isoformat(" ")
    return text.removesuffix("+00:00") + "Z" if value.tzinfo is not None and text.endswith("+00:00") else text


def _printable(text: str) -> str:
    """Control characters as escapes: stored text must not steer a terminal."""
    cut = text if len(text) <= CELL_CHARS_MAX else f"{text[:CELL_CHARS_MAX]}…"
    return cut.translate(_CONTROL).encode("utf-8", "backslashreplace").decode()


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


# -- csv and json ------------------------------------------------------------------------------------


def _write_csv(table: pa.Table, stream: TextIO) -> None:
    writer = csv.writer(stream, lineterminator="\r\n")
    writer.writerow(table.column_names)
    for row in _rows(table):
        writer.writerow([_csv_cell(value) for value in row])


def _csv_cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(_plain(value), ensure_ascii=False)
    plain = value if isinstance(value, float) else _plain(value)
    return str(plain).lower() if isinstance(plain, bool) else plain


def _write_json(table: pa.Table, stream: TextIO) -> None:
    names = _distinct(table.column_names)
    stream.write("[")
    for number, row in enumerate(_rows(table)):
        record = dict(zip(names, (_plain(value) for value in row), strict=True))
        stream.write(
            ("," if number else "") + "\n  " + json.dumps(record, ensure_ascii=False, allow_nan=False)
        )
    stream.write("\n]\n" if table.num_rows else "]\n")


def _distinct(names: Sequence[str]) -> list[str]:
    """Column names without doubles, which an object cannot have: ``a``, ``a_1``."""
    found: list[str] = []
    for name in names:
        label, count = name, 0
        while label in found:
            count += 1
            label = f"{name}_{count}"
        found.append(label)
    return found


def _plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return (
            int(value)
            if value == value.to_integral_value() and value.as_tuple().exponent == 0
            else float(value)
        )
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_plain(item) for item in value]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _rows(table: pa.Table) -> list[tuple[object, ...]]:
    """Rows as tuples: unlike ``to_pylist`` it keeps columns of equal names apart."""
    columns = [column.to_pylist() for column in table.columns]
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows
