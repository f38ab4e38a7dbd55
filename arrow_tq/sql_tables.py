"""The metadata tables inside one in-memory DuckDB: stored rows, and the views that users see.

A stored table has the contract's columns, the user columns as JSON text, and the row's key; the view
over it shows the contract's columns and each user column with a type of its own. Widening a user column
(int, then float, then JSON) is only a new view.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from arrow_tq_schemas.errors import InternalError
from arrow_tq_schemas.tables import TABLES

SCHEMA = "_store"
HIDDEN = ("columns", "rev", "key")
"""Columns of a change batch that no view shows."""
SQL_TYPES: Mapping[str, str] = {"bool": "BOOLEAN", "int": "BIGINT", "float": "DOUBLE"}


def create_table(name: str) -> str:
    """DDL of a stored table."""
    columns = ", ".join(f'"{field.name}" {_sql_type(field.type)}' for field in TABLES[name])
    return f'CREATE TABLE {SCHEMA}."{name}" ({columns}, "columns" VARCHAR, "key" BIGINT)'


def create_view(name: str, user_columns: Mapping[str, str]) -> str:
    """DDL of the view that users see; ``user_columns`` maps name to bool, int, float, text or json.

    Column names of SQL ignore case, so ``LR`` beside ``lr`` is shown as ``LR_1``.
    """
    shown = [f'stored."{field.name}"' for field in TABLES[name]]
    taken = {field.name.lower() for field in TABLES[name]}
    for column, kind in sorted(user_columns.items()):
        label, count = column, 0
        while label.lower() in taken:
            count += 1
            label = f"{column}_{count}"
        taken.add(label.lower())
        shown.append(f"{_extract(column, kind)} AS {_identifier(label)}")
    return f'CREATE OR REPLACE VIEW "{name}" AS SELECT {", ".join(shown)} FROM {SCHEMA}."{name}" AS stored'


def insert(name: str, source: str) -> str:
    """DML that adds the rows of a registered change batch."""
    columns = ", ".join(f'"{column}"' for column in (*TABLES[name].names, "columns", "key"))
    return f'INSERT INTO {SCHEMA}."{name}" ({columns}) SELECT {columns} FROM {source}'


def check_batch(name: str, table: pa.Table) -> pa.Table:
    """A change batch in the contract's column order and types."""
    schema = pa.schema(
        [*TABLES[name], ("columns", pa.string()), ("rev", pa.int64()), ("key", pa.int64())],
    )
    missing = [field.name for field in schema if field.name not in table.schema.names]
    if missing:
        raise InternalError(f"changes of {name!r} lack {', '.join(missing)}")
    return table.select(schema.names).cast(schema)


def _extract(column: str, kind: str) -> str:
    """Typed SQL of one key of the JSON text; a JSON null is NULL."""
    pointer = "/" + column.replace("~", "~0").replace("/", "~1")
    path = "'" + pointer.replace("'", "''") + "'"
    if kind == "json":
        return f"nullif(CAST(json_extract(stored.\"columns\", {path}) AS VARCHAR), 'null')"
    text = f'json_extract_string(stored."columns", {path})'
    if kind == "text":
        return text
    if kind not in SQL_TYPES:
        raise InternalError(f"user column {column!r}: kind {kind!r}, expected bool, int, float, text or json")
    return f"CAST({text} AS {SQL_TYPES[kind]})"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP WITH TIME ZONE"
    names = {pa.string(): "VARCHAR", pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN"}
    if kind not in names:
        raise InternalError(f"no SQL type for {kind}")
    return names[kind]
