"""Reads an export into a run: the same sessions, steps and views, and segments the same bit by bit."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field as slot
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.calls import ask, columns_json, read_table
from arrow_tq.importer.importing import ImportSummary
from arrow_tq.offline.layout import ExportManifest
from arrow_tq.offline.reading import ExportReader, Row
from arrow_tq.producer.branch import Branch
from arrow_tq.producer.encode import encode
from arrow_tq.producer.session import Session
from arrow_tq.producer.step import Step
from arrow_tq_schemas.chunks import from_array, to_array
from arrow_tq_schemas.commands import (
    Discard,
    Done,
    FinalizeSession,
    GetSegments,
    OpenSession,
    SegmentInfos,
    SessionInfo,
    UpdateSegments,
)
from arrow_tq_schemas.errors import Conflict, NotFound, SessionClosed
from arrow_tq_schemas.fields import Field, Task
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.tables import SEGMENTS as SEGMENT_COLUMNS

if TYPE_CHECKING:
    from arrow_tq.interface import Store
    from arrow_tq.runs import Run

NOT_EXPORTED = "not in the export"
COMPOSED = (
    *("segment_index", "segment_count", "num_tokens", "loss_tokens", "version_min", "version_max"),
    "finish_reason",
)
"""What composing a session again must give again."""


def import_export(store: Store, path: Path, run: str) -> ImportSummary:
    """Everything of an export into run ``run``, which is created where it is new.

    Sessions that the run has finished already are left alone, so the same import may be run again.

    Args:
        store: the store.
        path: the export's folder, or the manifest in it.
        run: name of the run to write into.

    Raises:
        MalformedMessage: the export is torn, or was edited; nothing was imported.
        Unsupported: a newer arrow-tq wrote it.
        Conflict: the run declares other fields or tasks; or a session became other segments than it was
            exported as.
    """
    started = time.monotonic()
    folder = path if path.is_dir() else path.parent
    manifest = ExportManifest.read(folder)
    manifest.check_files(folder)
    target = _open(store, run, manifest)
    work = _Work(target, ExportReader(manifest, folder))
    for session in work.source.sessions:
        _import_session(work, session)
    work.summary.elapsed_s = time.monotonic() - started
    return work.summary


@dataclass(slots=True)
class _Work:
    """An import under way."""

    run: Run
    source: ExportReader
    received: set[str] = slot(default_factory=set)
    """Fields that the steps of the session under way have rows of."""
    summary: ImportSummary = slot(default_factory=ImportSummary)


def _open(store: Store, name: str, manifest: ExportManifest) -> Run:
    tasks = [Task(spec.name, None if spec.fields is None else tuple(spec.fields)) for spec in manifest.tasks]
    try:
        store.run(name)
        known = True
    except NotFound:
        known = False
    run = store.run(name, list(manifest.declared().values()), tasks, manifest.durability)
    if not known and manifest.policy_version is not None:
        # The order of versions decides what is stale, and which version of a segment is its oldest.
        for version in dict.fromkeys([*manifest.versions, manifest.policy_version]):
            run.set_policy_version(version)
        run.set_policy_version(manifest.policy_version)
    return run


def _import_session(work: _Work, row: Row) -> None:
    run, session_id = work.run, row["session_id"]
    command = OpenSession(
        run=run.name,
        epoch=run.epoch,
        session_id=session_id,
        group=row["group_id"],
        tasks=row["tasks"],
        columns=row["columns"],
    )
    work.received.clear()
    session: Session | None = None
    try:
        info = ask(run.backend, command, SessionInfo)
        session = Session(run, info) if info.status == "open" else None
    except SessionClosed as error:
        if error.details.get("status") != "finalized":
            raise
    for step in work.source.steps_of(session_id):
        if session is None:
            _pass_over(work, step)
        else:
            _import_step(work, session, step)
    views = work.source.views_of(session_id)
    if session is None:
        work.summary.existing += 1
        return
    ids = [name for view in views for name in _finalize(work, session_id, view)]
    if ids:
        # Only now: what is discarded in one view may free what another is composed of.
        _settle(work, ids)
    work.summary.sessions += 1


def _pass_over(work: _Work, step: Row) -> None:
    """Leave out a step of a session that is there already."""
    for row in work.source.receipts_of(step):
        field = work.source.fields[row["field"]]
        for rows in row["pieces"]:
            for group in range(len(field.groups)):
                work.source.piece(field, group, rows)
    work.source.blobs_of(step)


def _import_step(work: _Work, session: Session, row: Row) -> None:
    """Commit one step as it was, over the rows that are stored anew."""
    start = row["sampled_start"]
    step = Step(
        session,
        row["step_id"],
        Branch(row["parent"], row["retry_of"], row["tools"], row["extends"]),
        row["messages"],
        row["version"],
        None if start is None else (start, row["sampled_end"]),
    )
    with step:
        for receipt in work.source.receipts_of(row):
            step.attach(_store(work, step, work.source.fields[receipt["field"]], receipt), overlay=True)
            work.received.add(receipt["field"])
        for blob in work.source.blobs_of(row):
            step.attach_blob(work.source.content(blob["blob_id"]), blob["media_type"])
    work.summary.steps += 1


def _store(work: _Work, step: Step, field: Field, row: Row) -> Receipt:
    """Put the rows of one receipt, under new chunk ids; one piece is in memory at a time."""
    run = work.run
    stored: list[StoredChunk] = []
    start = row["start"]
    for rows in row["pieces"]:
        pieces = [work.source.piece(field, group, rows) for group in range(len(field.groups))]
        encoded = encode(
            *(field, _whole(field, pieces), start),
            run=run.name,
            epoch=run.epoch,
            shard=run.backend.shard(),
            ids=run.ids,
            chunk_bytes=run.chunk_bytes,
        )
        step.store(field, encoded, private=True)
        step.flush()
        stored += encoded.receipt.chunks
        work.summary.payload_bytes += encoded.nbytes
        start += rows
    return Receipt(
        run=run.name,
        epoch=run.epoch,
        field=field.name,
        start=row["start"],
        rows=row["rows"],
        chunks=stored,
    )


def _whole(field: Field, pieces: Sequence[pa.Array]) -> pa.Array:
    """Rows of all layer groups side by side."""
    parts: list[npt.NDArray[np.generic]] = []
    valid = None
    for group, piece in enumerate(pieces):
        values, valid = from_array(piece, field.group_shape(group))
        parts.append(values)
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1 + (field.layer_axis or 0))
    kind = pa.fixed_shape_tensor(field.type.arrow, list(field.shape)) if field.shape else field.type.arrow
    return to_array(np.ascontiguousarray(whole), valid, kind)


def _finalize(work: _Work, session_id: str, view: Row) -> list[str]:
    """Compose one view again; the segments of the view that was exported."""
    run = work.run
    command = FinalizeSession(
        run=run.name,
        epoch=run.epoch,
        session_id=session_id,
        view=view["view"],
        reward=view["reward"],
        columns=view["columns"],
    )
    infos = ask(run.backend, command, SegmentInfos).segments
    work.summary.segments += len(infos)
    if view["view"] != work.source.manifest.view:
        return []
    work.summary.tokens += sum(info.num_tokens for info in infos)
    return [info.segment_id for info in infos]


def _settle(work: _Work, ids: list[str]) -> None:
    """Bring a session's segments to what was exported; discard those that were not."""
    run, view = work.run, work.source.manifest.view
    reply = run.backend.execute(GetSegments(run=run.name, ids=ids, view=view, manifests=False))
    for row in read_table(reply.blobs[0]).to_pylist():
        exported = work.source.segments.get(row["segment_id"])
        if exported is None:
            discard = Discard(
                run=run.name,
                epoch=run.epoch,
                ids=[row["segment_id"]],
                view=view,
                reason=NOT_EXPORTED,
            )
            ask(run.backend, discard, Done)
            continue
        _check_composed(work, row, exported)
        _update(work, row, exported, view)


def _check_composed(work: _Work, row: Row, exported: Row) -> None:
    fields = work.source.fields
    was = {name: exported[name] for name in COMPOSED}
    now = {name: row[name] for name in was}
    # Values that a trainer put late are no part of the steps, and not in the export.
    was["complete_fields"] = [
        name for name in exported["complete_fields"] if name in fields and name in work.received
    ]
    now["complete_fields"] = row["complete_fields"]
    if was != now:
        different = next(name for name in was if was[name] != now[name])
        raise Conflict(
            f"segment {row['segment_id']!r}: {different} was {was[different]!r} when it was exported and is "
            f"{now[different]!r} here",
            segment_id=row["segment_id"],
            column=different,
        )


def _update(work: _Work, row: Row, exported: Row, view: str) -> None:
    """Values that came after the session was finalized."""
    names = ["reward", *(name for name in exported if name not in SEGMENT_COLUMNS.names)]
    late = {name: exported[name] for name in names if exported[name] != row.get(name)}
    if not late:
        return
    for name in work.source.json_columns & late.keys():
        late[name] = None if late[name] is None else json.loads(late[name])
    command = UpdateSegments(
        run=work.run.name,
        ids=[row["segment_id"]],
        view=view,
        columns=columns_json(late),
    )
    ask(work.run.backend, command, Done)
