"""Reading and updating segments: metadata, manifests, rewards and columns that come late."""

from __future__ import annotations

import json
from typing import Any

import apsw
import pyarrow as pa

from arrow_tq.store.catalog.columns import check_reward, learn_kinds, parse_columns, read_kinds
from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.runs import RunRecord, WriterRuns
from arrow_tq.store.catalog.segment_names import resolve_segments
from arrow_tq.store.catalog.segment_rows import segment_table, where_columns
from arrow_tq.store.catalog.writer import Change
from arrow_tq.store.where import compile_where
from arrow_tq_schemas.commands import Done, GetSegments, ListSegments, UpdateSegments
from arrow_tq_schemas.errors import ChunkReleased

GONE = ("done", "discarded")
Clause = tuple[str, list[object]]
"""A predicate as SQLite SQL in brackets, and the values of its placeholders."""


def get_segments(
    connection: apsw.Connection, run: RunRecord, command: GetSegments
) -> tuple[pa.Table, list[bytes]]:
    """The rows in the order of the ids, and their manifests where asked for.

    Raises:
        NotFound: an unknown id, or a session without segments.
        ChunkReleased: a manifest of a segment that was discarded, or is done for every task.
    """
    rows = resolve_segments(connection, run, command.ids, command.view)
    manifests = []
    if command.manifests:
        manifests = [_manifest(connection, row) for row in rows]
    return segment_table(connection, rows, read_kinds(connection, "segments", run.id)), manifests


def list_segments(connection: apsw.Connection, run: RunRecord | None, command: ListSegments) -> pa.Table:
    """The newest ``limit`` segments of a view that fit, newest last."""
    run_id = None if run is None else run.id
    kinds = read_kinds(connection, "segments", run_id)
    sql, values = where_sql(command.where, kinds)
    newest: Any = connection.execute(
        f"SELECT segments.id FROM segments WHERE (? IS NULL OR segments.run = ?) AND segments.view = ? "
        f"AND {sql} ORDER BY segments.id DESC LIMIT ?",
        (run_id, run_id, command.view, *values, command.limit),
    )
    rows = [row for (row,) in newest]
    return segment_table(connection, rows[::-1], kinds)


def where_sql(where: str | None, kinds: dict[str, str]) -> Clause:
    """A predicate as SQL in brackets, true where there is none, and its bound values."""
    if where is None:
        return "1", []
    sql, values = compile_where(where, where_columns(kinds))
    return f"({sql})", values


def update_segments(change: Change, runs: WriterRuns, command: UpdateSegments) -> Done:
    """Set ``reward`` and user columns; counts the rows.

    Raises:
        NotFound: an unknown id; nothing was changed.
        InvalidInput: a column's name or value.
    """
    run = runs.get(change, command.run)
    columns = parse_columns(command.columns, own=("reward",))
    rows = sorted(set(resolve_segments(change.connection, run, command.ids, command.view)))
    assignments = ["updated_at = ?", "rev = ?"]
    values: list[Any] = [change.now_us, change.rev]
    if "reward" in columns:
        assignments.append("reward = ?")
        values.append(check_reward(columns.pop("reward")))
    if columns:
        paths = ", ".join(f"'$.{name}', json(?)" for name in columns)
        assignments.append(f"columns = json_set(columns, {paths})")
        values += [json.dumps(value) for value in columns.values()]
        learn_kinds(change, run.id, "segments", columns)
    change.execute(
        f"UPDATE segments SET {', '.join(assignments)} WHERE id IN (SELECT value FROM json_each(?))",
        (*values, row_list(rows)),
    )
    change.wakes = True
    return Done(count=len(rows))


def _manifest(connection: apsw.Connection, row: int) -> bytes:
    found: Any = connection.execute(
        "SELECT segment_id, status, reason, manifest FROM segments JOIN manifests ON segment = id "
        "WHERE id = ?",
        (row,),
    ).fetchone()
    name, status, reason, manifest = found
    if status in GONE:
        because = f": {reason}" if reason else " for every task"
        raise ChunkReleased(
            f"segment {name!r} is {status}{because}; its payload was released",
            segment_id=name,
            status=status,
            reason=reason,
        )
    return bytes(manifest)
