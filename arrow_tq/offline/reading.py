"""Reads the files of an export that was checked against its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field as slot
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrow_tq.offline.layout import (
    BLOB_SCHEMA,
    BLOBS,
    RECEIPTS,
    SCHEMAS,
    SEGMENTS,
    SESSIONS,
    STEP_BLOBS,
    STEPS,
    VIEWS,
    ExportManifest,
    payload_name,
)
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.fields import Field

KIND_KEY = b"arrow_tq.kind"
Row = dict[str, Any]
"""A row of one of the tables in ``layout.SCHEMAS``."""


@dataclass(slots=True)
class ExportReader:
    """An export's rows, in file order: the tables in step with one another, the payload piece by piece.

    Attributes:
        manifest: what the export is.
        sessions: rows of its sessions.
        segments: rows of the segments that were chosen, by id.
        fields: the exported fields by name.
        json_columns: user columns of segments whose text is JSON.
    """

    manifest: ExportManifest
    folder: Path
    sessions: Iterator[Row] = slot(init=False)
    segments: dict[str, Row] = slot(init=False)
    fields: Mapping[str, Field] = slot(init=False)
    json_columns: frozenset[str] = slot(init=False)
    _steps: _Cursor = slot(init=False)
    _receipts: _Cursor = slot(init=False)
    _views: _Cursor = slot(init=False)
    _step_blobs: _Cursor = slot(init=False)
    _contents: dict[str, pa.RecordBatch] | None = None
    _payload: dict[str, Iterator[pa.RecordBatch]] = slot(default_factory=dict)

    def __post_init__(self) -> None:
        self.fields = self.manifest.declared()
        self.json_columns = _json_columns(self.folder / SEGMENTS)
        self.sessions = _rows(self.folder / SESSIONS)
        self.segments = {row["segment_id"]: row for row in _rows(self.folder / SEGMENTS)}
        self._steps, self._receipts, self._views, self._step_blobs = (
            _Cursor(_rows(self.folder / name)) for name in (STEPS, RECEIPTS, VIEWS, STEP_BLOBS)
        )

    def steps_of(self, session_id: str) -> Iterator[Row]:
        return self._steps.take(lambda row: row["session_id"] == session_id)

    def views_of(self, session_id: str) -> list[Row]:
        return list(self._views.take(lambda row: row["session_id"] == session_id))

    def receipts_of(self, step: Row) -> list[Row]:
        key = (step["session_id"], step["step_id"])
        found = list(self._receipts.take(lambda row: (row["session_id"], row["step_id"]) == key))
        if len(found) != step["receipts"]:
            raise MalformedMessage(
                f"step {step['step_id']!r}: {len(found)} receipts, {step['receipts']} expected"
            )
        return found

    def blobs_of(self, step: Row) -> list[Row]:
        key = (step["session_id"], step["step_id"])
        return list(self._step_blobs.take(lambda row: (row["session_id"], row["step_id"]) == key))

    def content(self, blob_id: str) -> bytes:
        """A file; the mapped batches cost no memory until they are read."""
        if self._contents is None:
            self._contents = {}
            if (self.folder / BLOBS).exists():
                for batch in _batches(self.folder / BLOBS, BLOB_SCHEMA):
                    self._contents[batch.column(0)[0].as_py()] = batch
        if blob_id not in self._contents:
            raise MalformedMessage(f"{self.folder / BLOBS}: no blob {blob_id}, which a step refers to")
        content: bytes = self._contents[blob_id].column(1)[0].as_py()
        return content

    def piece(self, field: Field, group: int, rows: int) -> pa.Array:
        """The next piece of a payload file."""
        name = payload_name(field.name, group)
        if name not in self._payload:
            self._payload[name] = _batches(self.folder / name, field.arrow_schema(group))
        batch = next(self._payload[name], None)
        if batch is None or batch.num_rows != rows:
            there = "no more rows" if batch is None else f"{batch.num_rows} rows"
            raise MalformedMessage(f"{self.folder / name}: {there}, a receipt has a piece of {rows}")
        return batch.column(0)


class _Cursor:
    """Rows in file order, taken as long as they belong together."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._next: Row | None = next(rows, None)

    def take(self, belongs: Callable[[Row], bool]) -> Iterator[Row]:
        while self._next is not None and belongs(self._next):
            row = self._next
            self._next = next(self._rows, None)
            yield row


def _rows(path: Path) -> Iterator[Row]:
    for batch in _batches(path, SCHEMAS.get(path.name)):
        yield from batch.to_pylist()


def _json_columns(path: Path) -> frozenset[str]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        marked = [field.name for field in reader.schema if (field.metadata or {}).get(KIND_KEY) == b"json"]
    return frozenset(marked)


def _batches(path: Path, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
    """The batches of a file that was checked against the manifest. Raises ``MalformedMessage`` still."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            if schema is not None and not reader.schema.equals(schema):
                raise MalformedMessage(f"{path}: columns {reader.schema}, expected {schema}")
            for batch in reader:
                batch.validate(full=True)
                yield batch
    except (pa.ArrowInvalid, OSError) as error:
        raise MalformedMessage(f"{path}: {str(error).splitlines()[0]}") from None
