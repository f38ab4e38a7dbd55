"""Which statements a user may run: judged on DuckDB's own parse tree, before anything is bound or run.

The sandbox (no files, no configuration, a read-only transaction, a process of its own) is behind this.
The guard is for what the sandbox lets through: table functions that take raw pointers, change settings
of the instance or run text as SQL, and system tables that show the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from arrow_tq_schemas.errors import InvalidQuery

TABLE_FUNCTIONS = frozenset(
    {
        *("unnest", "range", "generate_series", "repeat", "repeat_row", "json_each", "json_tree"),
        *("histogram", "histogram_values", "summary", "icu_calendar_names", "pg_timezone_names"),
        *("duckdb_columns", "duckdb_functions", "duckdb_keywords", "duckdb_schemas", "duckdb_tables"),
        *("duckdb_types", "duckdb_views", "pragma_show", "pragma_table_info", "pragma_version"),
    }
)
"""Table functions that a query may call."""
SCALARS_REFUSED = frozenset(
    {"write_log", "current_setting", "getenv", "getvariable", "nextval", "setval", "sleep_ms", "pg_sleep"}
)
_SYSTEM = re.compile(r"^(duckdb_|pragma_|sqlite_|pg_settings$)")
_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_EXPLAIN = re.compile(r"\s*explain(\s+analyze)?\b", re.IGNORECASE)


def split_explain(query: str) -> str | None:
    """The statement that an EXPLAIN explains; None for other statements."""
    found = _EXPLAIN.match(query)
    return query[found.end() :] if found else None


def check_tree(serialized: str) -> None:
    """Judge a statement by the JSON that ``json_serialize_sql`` made of it.

    Raises:
        InvalidQuery: not a SELECT, or it calls what is not allowed; names it.
    """
    try:
        tree = json.loads(serialized)
    except RecursionError:
        raise InvalidQuery("SQL: expressions are nested too deep") from None
    if tree.get("error"):
        raise InvalidQuery(f"SQL: only SELECT is allowed ({tree.get('error_message')})")
    for node in _nodes(tree):
        _check(node)


def _check(node: dict[str, object]) -> None:
    kind = node.get("type")
    if isinstance(kind, str) and kind.endswith("_NODE") and kind not in _NODES:
        raise InvalidQuery(f"SQL: {kind.partition('_')[0]} is not allowed; only SELECT is")
    if kind == "TABLE_FUNCTION":
        function = node.get("function")
        name = str(function.get("function_name") if isinstance(function, dict) else function).lower()
        if name not in TABLE_FUNCTIONS:
            raise InvalidQuery(f"SQL: table function {name!r} is not allowed", function=name)
    if kind == "BASE_TABLE":
        name = str(node.get("table_name")).lower()
        if _SYSTEM.match(name) and name not in TABLE_FUNCTIONS:
            raise InvalidQuery(f"SQL: system table {name!r} is not allowed", table=name)
    name = str(node.get("function_name", "")).lower()
    if name in SCALARS_REFUSED or name.startswith("__"):
        raise InvalidQuery(f"SQL: function {name!r} is not allowed", function=name)


def _nodes(tree: object) -> Iterator[dict[str, object]]:
    """Every object of a JSON value, without recursion."""
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
