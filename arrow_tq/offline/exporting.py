"""Writes the sessions of some segments, whole, as an export. Payload passes through piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.backend import Read, Rows
from arrow_tq.blobs import read_blob
from arrow_tq.calls import ask, read_table
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
    ExportedFile,
    ExportManifest,
    file_digest,
    payload_name,
)
from arrow_tq.producer.encode import CHUNK_BYTES, rows_per_chunk
from arrow_tq_schemas.blobs import StepBlob
from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.commands import GetSegments, GetSession, OpenRun, RunInfo, SessionRecord, TaskSpec, View
from arrow_tq_schemas.errors import ChunkReleased, InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import Span, to_spans

if TYPE_CHECKING:
    from arrow_tq.runs import Run

SEGMENTS_PER_CALL = 4096
ROWS_PER_BATCH = 4096
_Piece = tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_] | None]


@dataclass(frozen=True, slots=True)
class Selection:
    """What to export.

    Args:
        ids: segments, in the order in which they are to be claimed again.
        view: their view.
        task: whose claim they are, for the record.
        fields: names of the fields to take; None: all of the run's.
    """

    ids: Sequence[str]
    view: View = "lineage"
    task: str | None = None
    fields: Sequence[str] | None = None


def export_segments(run: Run, selection: Selection, folder: Path) -> ExportManifest:
    """Write the sessions of these segments to an empty or new ``folder``; the manifest comes last.

    Sessions are exported whole: steps with their messages, every view, all rows of the chosen fields.

    Raises:
        InvalidInput: nothing is selected, or the folder is not empty.
        NotFound: an unknown id.
        ChunkReleased: some rows of a session are gone (another of its segments was released or discarded, or
            a task that reads fewer fields is done); fewer ``fields`` may still be whole.
    """
    if not selection.ids:
        raise InvalidInput("export: no segment is selected")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InvalidInput(f"{folder}: not empty: an export makes a folder of its own", path=str(folder))
    names = list(run.fields) if selection.fields is None else list(selection.fields)
    fields = {name: run.field(name) for name in names}
    table = _segments(run, selection)
    with _Files(folder) as files:
        export = _Export(run, fields, files)
        for session_id in dict.fromkeys(table.column("session_id").to_pylist()):
            export.add(session_id)
        files.write_table(SEGMENTS, table)
        files.close()
        export.manifest(selection, table, files.written).write(folder)
    return ExportManifest.read(folder)


def _segments(run: Run, selection: Selection) -> pa.Table:
    tables = []
    for first in range(0, len(selection.ids), SEGMENTS_PER_CALL):
        ids = list(selection.ids[first : first + SEGMENTS_PER_CALL])
        command = GetSegments(run=run.name, ids=ids, view=selection.view, manifests=False)
        tables.append(read_table(run.backend.execute(command).blobs[0]))
    return pa.concat_tables(tables, promote_options="permissive")


class _Export:
    """An export under way."""

    def __init__(self, run: Run, fields: Mapping[str, Field], files: _Files) -> None:
        self._run = run
        self._fields = fields
        self._files = files
        self._versions: list[str] = []
        self._blobs: set[str] = set()
        self._sessions = self._steps = 0

    def add(self, session_id: str) -> None:
        """One session: its row, its views, and its steps page by page."""
        first: int | None = 0
        while first is not None:
            command = GetSession(run=self._run.name, session_id=session_id, first_step=first)
            record = ask(self._run.backend, command, SessionRecord)
            if first == 0:
                self._write_session(record)
            self._write_steps(record)
            first = record.next_step

    def manifest(self, selection: Selection, table: pa.Table, files: list[ExportedFile]) -> ExportManifest:
        info = self._info()
        tasks = [_reading(spec, self._fields) for spec in info.tasks]
        return ExportManifest(
            run=self._run.name,
            fields=[field.to_json() for field in self._fields.values()],
            tasks=tasks,
            durability=info.durability,
            policy_version=info.policy_version,
            versions=self._versions,
            view=selection.view,
            task=selection.task,
            sessions=self._sessions,
            steps=self._steps,
            segments=table.num_rows,
            tokens=sum(table.column("num_tokens").to_pylist()),
            files=files,
        )

    def _info(self) -> RunInfo:
        return ask(self._run.backend, OpenRun(run=self._run.name), RunInfo)

    def _write_session(self, record: SessionRecord) -> None:
        self._sessions += 1
        self._versions = record.versions
        row: dict[str, object] = {
            "session_id": record.session_id,
            "group_id": record.group,
            "tasks": record.tasks,
            "columns": record.columns,
        }
        self._files.write_rows(SESSIONS, [row])
        views = [{"session_id": record.session_id, **view.model_dump()} for view in record.views]
        self._files.write_rows(VIEWS, views)

    def _write_steps(self, record: SessionRecord) -> None:
        for step in record.steps:
            kept = [receipt for receipt in step.receipts if receipt.field in self._fields]
            start, end = step.sampled or (None, None)
            row = step.model_dump(exclude={"receipts", "sampled", "blobs"})
            row |= {"session_id": record.session_id, "sampled_start": start, "sampled_end": end}
            self._files.write_rows(STEPS, [{**row, "receipts": len(kept)}])
            for receipt in kept:
                self._write_receipt(record.session_id, step.step_id, receipt)
            for blob in step.blobs:
                self._write_blob(record.session_id, step.step_id, blob)
            self._steps += 1

    def _write_blob(self, session_id: str, step_id: str, blob: StepBlob) -> None:
        """A step's file; its content where it is the first that refers to it."""
        row: dict[str, object] = {"session_id": session_id, "step_id": step_id}
        row |= {"blob_id": blob.blob_id, "media_type": blob.media_type}
        self._files.write_rows(STEP_BLOBS, [row])
        if blob.blob_id not in self._blobs:
            self._blobs.add(blob.blob_id)
            content = read_blob(self._run.backend, self._run.name, blob.blob_id)
            columns = [pa.array([blob.blob_id], pa.string()), pa.array([content], pa.large_binary())]
            self._files.write_batch(BLOBS, pa.RecordBatch.from_arrays(columns, schema=BLOB_SCHEMA))

    def _write_receipt(self, session_id: str, step_id: str, receipt: Receipt) -> None:
        field = self._fields[receipt.field]
        sizes = _piece_rows(field, receipt.rows)
        try:
            for group in range(len(field.groups)):
                for piece in self._pieces(field, group, receipt, sizes):
                    self._files.write_payload(field, group, piece)
        except ChunkReleased as error:
            raise ChunkReleased(
                f"session {session_id!r}, step {step_id!r}: rows of {field.name!r} are released already, so "
                f"it cannot be exported whole (fewer fields may be): {error.message}",
                **error.details,
            ) from None
        row = {"session_id": session_id, "step_id": step_id, "field": field.name, "pieces": sizes}
        self._files.write_rows(RECEIPTS, [{**row, "start": receipt.start, "rows": receipt.rows}])

    def _pieces(self, field: Field, group: int, receipt: Receipt, sizes: Sequence[int]) -> Iterator[_Piece]:
        """A receipt's rows of one group, cut where the other groups are."""
        spans = to_spans(Span(chunk.start, chunk.chunk_id, 0, chunk.rows) for chunk in receipt.chunks)
        if len(spans):
            request = Read(self._run.name, field, group, None, spans)
            yield from _recut(self._run.backend.read(request), sizes)


def _reading(spec: TaskSpec, fields: Mapping[str, Field]) -> TaskSpec:
    """The task over the exported fields."""
    if spec.fields is None:
        return spec
    return TaskSpec(name=spec.name, fields=[name for name in spec.fields if name in fields])


def _piece_rows(field: Field, rows: int) -> list[int]:
    """Rows of the record batches that ``rows`` are written as: about 8 MiB of the largest group."""
    most = rows_per_chunk(field, CHUNK_BYTES)
    return [min(most, rows - first) for first in range(0, rows, most)]


def _recut(blocks: Iterator[Rows], sizes: Sequence[int]) -> Iterator[_Piece]:
    """The same rows in pieces of these sizes."""
    held: list[Rows] = []
    have = 0
    wanted = iter(sizes)
    size = next(wanted, None)
    for block in blocks:
        held.append(block)
        have += len(block.values)
        while size is not None and have >= size:
            piece, held = _take(held, size)
            have -= size
            yield piece
            size = next(wanted, None)


def _take(held: list[Rows], size: int) -> tuple[_Piece, list[Rows]]:
    """The first ``size`` rows of some blocks, and the blocks that are left."""
    taken: list[Rows] = []
    while size:
        block = held[0]
        count = min(size, len(block.values))
        valid = None if block.valid is None else block.valid[:count]
        taken.append(Rows(block.values[:count], valid))
        rest = None if block.valid is None else block.valid[count:]
        held = [Rows(block.values[count:], rest), *held[1:]] if count < len(block.values) else held[1:]
        size -= count
    values = taken[0].values if len(taken) == 1 else np.concatenate([part.values for part in taken])
    if all(part.valid is None for part in taken):
        return (values, None), held
    masks = [np.ones(len(part.values), np.bool_) if part.valid is None else part.valid for part in taken]
    return (values, np.concatenate(masks)), held


class _Files:
    """Arrow IPC streams that grow in a folder; rows of the tables wait until a batch is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, tuple[Any, pa.ipc.RecordBatchStreamWriter]] = {}
        self._rows: dict[str, int] = {}
        self._waiting: dict[str, list[dict[str, object]]] = {name: [] for name in SCHEMAS}
        self.written: list[ExportedFile] = []

    def write_rows(self, name: str, rows: list[dict[str, object]]) -> None:
        waiting = self._waiting[name]
        waiting += rows
        if len(waiting) >= ROWS_PER_BATCH:
            self._flush(name)

    def write_table(self, name: str, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=ROWS_PER_BATCH) or [_empty(table.schema)]:
            self.write_batch(name, batch)

    def write_payload(self, field: Field, group: int, piece: _Piece) -> None:
        values, valid = piece
        schema = field.arrow_schema(group)
        array = to_array(np.ascontiguousarray(values), valid, schema.field(0).type)
        self.write_batch(payload_name(field.name, group), pa.RecordBatch.from_arrays([array], schema=schema))

    def close(self) -> None:
        """Finish every file, and note its size, rows and digest. Idempotent."""
        for name in SCHEMAS:
            self._flush(name, always=True)
        writers, self._writers = self._writers, {}
        for name, (sink, writer) in writers.items():
            writer.close()
            sink.close()
            path = self._folder / name
            size, digest = path.stat().st_size, file_digest(path)
            self.written.append(ExportedFile(name=name, bytes=size, rows=self._rows[name], sha256=digest))

    def _flush(self, name: str, always: bool = False) -> None:
        rows, self._waiting[name] = self._waiting[name], []
        if rows or (always and name not in self._rows):
            self.write_batch(name, pa.RecordBatch.from_pylist(rows, schema=SCHEMAS[name]))

    def write_batch(self, name: str, batch: pa.RecordBatch) -> None:
        if name not in self._writers:
            sink = pa.OSFile(str(self._folder / name), "wb")
            self._writers[name] = sink, pa.ipc.new_stream(sink, batch.schema)
            self._rows[name] = 0
        self._writers[name][1].write_batch(batch)
        self._rows[name] += batch.num_rows

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for sink, writer in self._writers.values():
            writer.close()
            sink.close()
        self._writers.clear()


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)
