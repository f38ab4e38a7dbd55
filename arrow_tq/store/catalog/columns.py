"""Columns that users pass: what is allowed, and what type each has in a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping

import apsw

from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.names import check_identifier
from arrow_tq_schemas.tables import RESERVED_COLUMNS

COLUMNS_MAX = 256
COLUMNS_BYTES_MAX = 1 << 20
NESTING_MAX = 64
NULL = "null"
"""Kind of a column that has had no value yet; shown as text."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64 = range(-(1 << 63), 1 << 63)
Columns = dict[str, object]


def parse_columns(text: str, own: tuple[str, ...] = ()) -> Columns:
    """The columns in a JSON object.

    Args:
        text: JSON text of a flat object.
        own: reserved names that the caller takes out itself (``reward``).

    Raises:
        InvalidInput: naming the column whose name or value cannot be one.
    """
    if len(text) > COLUMNS_BYTES_MAX:
        raise InvalidInput(f"columns of {len(text)} characters: at most {COLUMNS_BYTES_MAX}")
    if text == "{}":
        return {}
    try:
        columns = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"columns: expected a JSON object ({error})") from None
    if not isinstance(columns, dict):
        raise InvalidInput(f"columns: expected a JSON object, got {type(columns).__name__}")
    if len(columns) > COLUMNS_MAX:
        raise InvalidInput(f"{len(columns)} columns: at most {COLUMNS_MAX}")
    for name, value in columns.items():
        if name not in own:
            check_identifier(name, "column name")
            if name.lower() in RESERVED_COLUMNS:
                raise InvalidInput(f"column {name!r}: the name is taken by a column of arrow-tq", column=name)
        _check_value(name, value, 0)
    return columns


def columns_text(columns: Mapping[str, object]) -> str:
    """JSON text, ASCII, with keys in order: equal columns have equal text."""
    return json.dumps(columns, sort_keys=True, separators=(",", ":")) if columns else "{}"


def kind_of(value: object) -> str:
    """bool, int, float, text, json, or null."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "json"
    if isinstance(value, float):
        return "float"
    return "text" if isinstance(value, str) else "json"


def widen(one: str, two: str) -> str:
    """The kind that holds both: int and float make float, other mixtures json."""
    if one == two or two == NULL:
        return one
    if one == NULL:
        return two
    return "float" if {one, two} == {"int", "float"} else "json"


def learn_kinds(change: Change, run: int, table: str, columns: Mapping[str, object]) -> None:
    """Note the kinds of columns that a row of ``table`` (sessions or segments) now has."""
    for name, value in columns.items():
        kind = kind_of(value)
        known = change.execute(
            "SELECT kind FROM column_kinds WHERE run = ? AND tbl = ? AND name = ?", (run, table, name)
        ).get
        wider = kind if known is None else widen(known, kind)
        if wider != known:
            change.execute(
                "INSERT OR REPLACE INTO column_kinds VALUES (?, ?, ?, ?)", (run, table, name, wider)
            )


def read_kinds(connection: apsw.Connection, table: str, run: int | None) -> dict[str, str]:
    """Kind of each user column of ``table``, by name in order; over every run for None."""
    rows = connection.execute(
        "SELECT name, kind FROM column_kinds WHERE tbl = ?1 AND (?2 IS NULL OR run = ?2) ORDER BY name",
        (table, run),
    )
    return merge_kinds(rows)


def merge_kinds(rows: Iterable[tuple[str, str]]) -> dict[str, str]:
    """One kind a column name, wide enough for all that it was seen as."""
    kinds: dict[str, str] = {}
    for name, kind in rows:
        kinds[name] = widen(kinds.get(name, NULL), kind)
    return {name: "text" if kind == NULL else kind for name, kind in kinds.items()}


def check_reward(value: object) -> float | None:
    """A reward as a float, or None.

    Raises:
        InvalidInput: not a number, or not finite (SQL could not tell it from a missing one).
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"reward {value!r}: expected a finite number or None", column="reward")
    return float(value)


def _check_value(name: str, value: object, depth: int) -> None:
    if depth > NESTING_MAX:
        raise InvalidInput(f"column {name!r}: nested deeper than {NESTING_MAX}", column=name)
    if isinstance(value, str):
        found = _SURROGATE.search(value)
        if found is not None:
            raise InvalidInput(f"column {name!r}: a lone surrogate at {found.start()}", column=name)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidInput(f"column {name!r}: {value} is not finite", column=name)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_value(name, key, depth)
            _check_value(name, item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_value(name, item, depth + 1)


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")
