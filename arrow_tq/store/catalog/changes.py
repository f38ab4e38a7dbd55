"""Rows that changed since a revision, as Arrow: what the SQL worker applies to its copy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apsw
import numpy as np
import pyarrow as pa

from arrow_tq.store.catalog.bundle_rows import BUNDLE_COLUMNS
from arrow_tq_schemas.blobs import BLOB_FIELD
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import Spans, empty_spans
from arrow_tq_schemas.tables import TABLES

ROWS_PER_BATCH = 16_384
MANIFESTS_PER_BATCH = 256
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
        {"run": "runs.run", "session_id": "sessions.session_id"},
        _SESSION_RUN.format(table="steps"),
        "NULL",
    ),
    "segments": ("segments", {"run": "runs.run"}, _RUN.format(table="segments"), "segments.columns"),
    "blobs": (
        "blobs",
        {"run": "runs.run", "blob_id": "lower(hex(blobs.blob_id))"},
        _RUN.format(table="blobs"),
        "NULL",
    ),
    "step_blobs": (
        "step_blobs",
        {
            "run": "runs.run",
            "session_id": "sessions.session_id",
            "step_id": "steps.step_id",
            "blob_id": "lower(hex(blobs.blob_id))",
        },
        _SESSION_RUN.format(table="step_blobs")
        + " JOIN steps ON steps.id = step_blobs.step JOIN blobs ON blobs.id = step_blobs.blob",
        "NULL",
    ),
    "claims": (
        "claims",
        {
            "run": "runs.run",
            "released_ranks": "(SELECT count(*) FROM claim_ranks WHERE claim_ranks.claim = claims.id)",
        },
        # Those that took nothing are deleted in time, and no row that was shown ever is.
        _RUN.format(table="claims") + " AND claims.segments > 0",
        "NULL",
    ),
    "marks": ("marks", {"run": "runs.run"}, _RUN.format(table="marks"), "NULL"),
    "bundles": ("bundles", BUNDLE_COLUMNS, _RUN.format(table="bundles"), "NULL"),
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
    """One row a layer group, with its share of the bytes. A blob's chunk has no session."""
    row_bytes: dict[tuple[str, str], list[int]] = {}
    cursor = connection.execute(
        "SELECT chunk_id, runs.run, sessions.session_id, chunks.field, groups, start, rows, chunks.state,"
        " chunks.created_at, chunks.rev, chunks.id FROM chunks "
        "LEFT JOIN sessions ON sessions.id = chunks.session LEFT JOIN blobs ON blobs.id = chunks.blob "
        "JOIN runs ON runs.id = coalesce(sessions.run, blobs.run) "
        "WHERE chunks.rev > ? AND (? IS NULL OR runs.run = ?) ORDER BY chunks.rev",
        (after, run, run),
    )
    for block in _blocks(cursor):
        rows = []
        for raw, name, session, field, groups, start, count, state, created, rev, key in block:
            if (name, field) not in row_bytes:
                row_bytes.update(_row_bytes(connection, name))
            sizes = row_bytes[name, field]
            first = ChunkId(int.from_bytes(raw, "big"))
            for group in range(groups):
                one = first.sibling(group)
                rows.append(
                    (
                        *(one.hex, name, session, field, group, one.shard, start, count),
                        *(count * sizes[group], state, created, None, rev, key << GROUP_KEY_BITS | group),
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
    for block in _blocks(cursor, MANIFESTS_PER_BATCH):
        yield _spans_of(block, schema)


def _spans_of(block: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """The spans of some manifests, field by field."""
    parts: list[Spans] = [empty_spans()]
    counts: list[int] = []
    labels: list[tuple[str, str, str, int]] = []
    keys = [np.empty(0, np.int64)]
    for name, segment, raw, rev, row in block:
        first = row << SPANS_KEY_BITS
        for field, spans in Manifest.decode(raw).spans.items():
            parts.append(spans)
            counts.append(len(spans))
            labels.append((name, segment, field, rev))
            keys.append(np.arange(first, first + len(spans), dtype=np.int64))
            first += len(spans)
    spans = np.concatenate(parts)
    place = pa.array(np.repeat(np.arange(len(counts)), counts))
    names, segments, fields, revs = zip(*labels, strict=True) if labels else ((), (), (), ())
    arrays = [
        *(pa.array(column, pa.string()).take(place) for column in (names, segments, fields)),
        *(pa.array(spans["start"]), pa.array(spans["rows"].astype(np.int64)), hex_ids(spans)),
        *(pa.array(spans["row"].astype(np.int64)), pa.nulls(len(spans), pa.string())),
        *(pa.array(revs, pa.int64()).take(place), pa.array(np.concatenate(keys))),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def hex_ids(spans: Spans) -> pa.Array:
    """Chunk ids of spans as text, without a Python object a span."""
    halves = np.stack([spans["high"], spans["low"]], axis=1).astype(">u8")
    text = halves.tobytes().hex().encode()
    offsets = np.arange(len(spans) + 1, dtype=np.int64) * 32
    wide = pa.LargeStringArray.from_buffers(len(spans), pa.py_buffer(offsets), pa.py_buffer(text))
    return wide.cast(pa.string())


def _blocks(cursor: apsw.Cursor, size: int = ROWS_PER_BATCH) -> Iterator[list[tuple[Any, ...]]]:
    block: list[tuple[Any, ...]] = []
    for row in cursor:
        block.append(row)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def _batch(values: Sequence[Sequence[object]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) for column, field in zip(values, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _row_bytes(connection: apsw.Connection, run: str) -> dict[tuple[str, str], list[int]]:
    """By run and field, the bytes of one row in each layer group."""
    text = connection.execute("SELECT fields FROM runs WHERE run = ?", (run,)).get
    declared = [BLOB_FIELD, *map(Field.from_json, json.loads(text))]
    return {
        (run, field.name): [
            math.prod(field.group_shape(group)) * field.type.numpy.itemsize
            for group in range(len(field.groups))
        ]
        for field in declared
    }
