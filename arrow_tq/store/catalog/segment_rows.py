"""Segments as a table: the columns that ``where`` may use, and rows as Arrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import apsw
import pyarrow as pa

from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.clause import Column
from arrow_tq_schemas.tables import SEGMENTS

_KINDS = {
    pa.string(): "text",
    pa.int64(): "int",
    pa.float64(): "float",
    pa.timestamp("us", tz="UTC"): "int",
    pa.list_(pa.string()): "list",
}
_ARROW = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "json": pa.string(),
}
_RUN_NAME = "(SELECT runs.run FROM runs WHERE runs.id = segments.run)"
_SELECT = ", ".join(_RUN_NAME if name == "run" else f"segments.{name}" for name in SEGMENTS.names)


def where_columns(user: Mapping[str, str]) -> dict[str, Column]:
    """What a predicate over segments may name; times are microseconds since 1970."""
    columns = {
        field.name: Column(_RUN_NAME if field.name == "run" else f"segments.{field.name}", _KINDS[field.type])
        for field in SEGMENTS
    }
    for name, kind in user.items():
        columns[name] = Column(f"json_extract(segments.columns,'$.{name}')", kind)
    return columns


def segment_table(connection: apsw.Connection, ids: Sequence[int], user: Mapping[str, str]) -> pa.Table:
    """Rows of these segments, in this order: ``tables.SEGMENTS``, then the user's columns by their kind."""
    found = {
        row[0]: row[1:]
        for row in connection.execute(
            f"SELECT segments.id, segments.columns, {_SELECT} FROM segments "
            "WHERE segments.id IN (SELECT value FROM json_each(?))",
            (row_list(ids),),
        )
    }
    rows = [found[one] for one in ids]
    base = list(zip(*rows, strict=True))[1:] if rows else [()] * len(SEGMENTS)
    arrays = [
        pa.array(_lists(values) if pa.types.is_list(field.type) else values, field.type)
        for field, values in zip(SEGMENTS, base, strict=True)
    ]
    extra = [{} if row[0] == "{}" else json.loads(row[0]) for row in rows]
    arrays += [typed([row.get(name) for row in extra], kind) for name, kind in user.items()]
    schema = pa.schema([*SEGMENTS, *(_user_field(name, kind) for name, kind in user.items())])
    return pa.Table.from_arrays(arrays, schema=schema)


def _user_field(name: str, kind: str) -> pa.Field:
    """JSON is text to Arrow: its kind is said beside it."""
    return pa.field(name, _ARROW[kind], metadata={"arrow_tq.kind": "json"} if kind == "json" else None)


def typed(values: Sequence[object], kind: str) -> pa.Array:
    """Values of a user column as Arrow; kind ``json`` as JSON text."""
    if kind == "json":
        plain: Sequence[object] = [None if value is None else json.dumps(value) for value in values]
    elif kind == "float":
        plain = [None if value is None else float(value) for value in values]  # type: ignore[arg-type]
    else:
        plain = values
    return pa.array(plain, _ARROW[kind])


def _lists(texts: Sequence[str]) -> list[list[str]]:
    """Lists from their JSON text; there are few different ones."""
    known: dict[str, list[str]] = {}
    lists = []
    for text in texts:
        found = known.get(text)
        if found is None:
            found = known[text] = json.loads(text)
        lists.append(found)
    return lists
