"""Rows that changed since a revision, as Arrow: what the SQL worker applies to its copy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apsw
import numpy as np
import pyarrow as pa

from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import Spans
from arrow_tq_schemas.tables import TABLES

ROWS_PER_BATCH = 16_384
SPANS_KEY_BITS = 24
"""A manifest has fewer than 2^24 spans, so row and span make one key."""
GROUP_KEY_BITS = 8
_RUN = "JOIN runs ON runs.id = {table}.run"
_SESSION_RUN = "JOIN sessions ON sessions.id = {table}.session JOIN runs ON runs.id = sessions.run"
_SELECTS: dict[str, tuple[str, Mapping[str, str], str, str]] = {
    "runs": ("runs", {}, "", "NULL"),
    "sessions": (
        "sessions",
        {"run": "runs.run", "tasks": "(SELECT tasks FROM task_sets WHERE task_sets.id = sessions.task_set)"},
        _RUN.format(table="sessions"),
        "sessions.columns",
    ),
    "steps": (
        "steps",
        {"run": "runs.run", "session_id": "sessions.session_id", "status": "'committed'"},
        _SESSION_RUN.format(table="steps"),
        "NULL",
    ),
    "segments": ("segments", {"run": "runs.run"}, _RUN.format(table="segments"), "segments.columns"),
}
"""By table: its SQL name, expressions that are not columns of it, joins, and its user columns."""


def tail_schema(table: str) -> pa.Schema:
    """Schema of ``read_changes``: the table's, then ``columns`` (JSON text), ``rev`` and ``key``."""
    more = [pa.field("columns", pa.string()), pa.field("rev", pa.int64()), pa.field("key", pa.int64())]
    return pa.schema([*TABLES[table], *more])


def read_changes(
    connection: apsw.Connection, table: str, run: str | None, after: int
) -> tuple[pa.Table, int]:
    """Rows of ``table`` that a transaction after ``after`` touched, and the revision that this reaches.

    ``key`` is unique in the table, over all runs, and stays with its row: a row seen before replaces the
    older one. Nothing is ever deleted. Read inside one snapshot.
    """
    if table not in TABLES:
        raise InvalidInput(f"table {table!r}: expected one of {', '.join(TABLES)}")
    revision = int(connection.execute("SELECT rev FROM state").get)
    schema = tail_schema(table)
    if table == "spans":
        batches = _span_batches(connection, run, after, schema)
    elif table == "chunks":
        batches = _chunk_batches(connection, run, after, schema)
    else:
        batches = _row_batches(connection, table, run, after, schema)
    return pa.Table.from_batches(list(batches), schema), revision


def _row_batches(
    connection: apsw.Connection, table: str, run: str | None, after: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    name, special, joins, columns = _SELECTS[table]
    chosen = ", ".join(special.get(one, f"{name}.{one}") for one in TABLES[table].names)
    cursor = connection.execute(
        f"SELECT {chosen}, {columns}, {name}.rev, {name}.id FROM {name} {joins} "
        f"WHERE {name}.rev > ? AND (? IS NULL OR runs.run = ?) ORDER BY {name}.rev",
        (after, run, run),
    )
    lists = [index for index, field in enumerate(schema) if pa.types.is_list(field.type)]
    for rows in _blocks(cursor):
        values: list[Sequence[object]] = list(zip(*rows, strict=True))
        for index in lists:
            values[index] = [json.loads(str(text)) for text in values[index]]
        yield _batch(values, schema)


def _chunk_batches(
    connection: apsw.Connection, run: str | None, after: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """One row a layer group, with its share of the bytes."""
    fields: dict[str, dict[str, Field]] = {}
    cursor = connection.execute(
        "SELECT chunk_id, runs.run, sessions.session_id, chunks.field, groups, start, rows, state,"
        " chunks.created_at, chunks.rev, chunks.id FROM chunks "
        + _SESSION_RUN.format(table="chunks")
        + " WHERE chunks.rev > ? AND (? IS NULL OR runs.run = ?) ORDER BY chunks.rev",
        (after, run, run),
    )
    for block in _blocks(cursor):
        rows = []
        for raw, name, session, field, groups, start, count, state, created, rev, key in block:
            if name not in fields:
                fields[name] = _fields(connection, name)
            declared = fields[name][field]
            first = ChunkId(int.from_bytes(raw, "big"))
            for group in range(groups):
                size = count * int(np.prod(declared.group_shape(group), dtype=np.int64))
                rows.append(
                    (
                        *(first.sibling(group).hex, name, session, field, group, first.shard, start, count),
                        *(size * declared.type.numpy.itemsize, state, created, None, rev),
                        key << GROUP_KEY_BITS | group,
                    )
                )
        yield _batch(list(zip(*rows, strict=True)), schema)


def _span_batches(
    connection: apsw.Connection, run: str | None, after: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    cursor: Any = connection.execute(
        "SELECT runs.run, segments.segment_id, manifest, manifests.rev, segments.id FROM manifests "
        "JOIN segments ON segments.id = manifests.segment JOIN runs ON runs.id = segments.run "
        "WHERE manifests.rev > ? AND (? IS NULL OR runs.run = ?) ORDER BY manifests.rev",
        (after, run, run),
    )
    for name, segment, raw, rev, row in cursor:
        manifest = Manifest.decode(raw)
        spans = np.concatenate(list(manifest.spans.values()))
        total = len(spans)
        if not total:
            continue
        counts = [len(part) for part in manifest.spans.values()]
        of_field = pa.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        names = pa.DictionaryArray.from_arrays(of_field, pa.array(list(manifest.spans), pa.string()))
        arrays = [
            *(pa.repeat(pa.scalar(name), total), pa.repeat(pa.scalar(segment), total)),
            *(names.cast(pa.string()), pa.array(spans["start"]), pa.array(spans["rows"].astype(np.int64))),
            *(hex_ids(spans), pa.array(spans["row"].astype(np.int64)), pa.nulls(total, pa.string())),
            pa.repeat(pa.scalar(rev, pa.int64()), total),
            pa.array((row << SPANS_KEY_BITS) + np.arange(total, dtype=np.int64)),
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def hex_ids(spans: Spans) -> pa.Array:
    """Chunk ids of spans as text, without a Python object a span."""
    halves = np.stack([spans["high"], spans["low"]], axis=1).astype(">u8")
    text = halves.tobytes().hex().encode()
    offsets = np.arange(len(spans) + 1, dtype=np.int64) * 32
    wide = pa.LargeStringArray.from_buffers(len(spans), pa.py_buffer(offsets), pa.py_buffer(text))
    return wide.cast(pa.string())


def _blocks(cursor: apsw.Cursor) -> Iterator[list[tuple[Any, ...]]]:
    block: list[tuple[Any, ...]] = []
    for row in cursor:
        block.append(row)
        if len(block) == ROWS_PER_BATCH:
            yield block
            block = []
    if block:
        yield block


def _batch(values: Sequence[Sequence[object]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) for column, field in zip(values, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _fields(connection: apsw.Connection, run: str) -> dict[str, Field]:
    text = connection.execute("SELECT fields FROM runs WHERE run = ?", (run,)).get
    return {field.name: field for field in map(Field.from_json, json.loads(text))}
