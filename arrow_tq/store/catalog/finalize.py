"""Finalizing: composes a session's segments outside the writer, then stores them in one operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import apsw
import numpy as np

from arrow_tq.store.catalog.chunk_rows import release_unheld, take_holds
from arrow_tq.store.catalog.columns import check_reward, columns_text, learn_kinds, parse_columns
from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq.store.catalog.runs import RunRecord, WriterRuns
from arrow_tq.store.catalog.sessions import FINALIZED, SessionRow, get_session
from arrow_tq.store.catalog.task_sets import NOBODY
from arrow_tq.store.catalog.versions import version_ordinal
from arrow_tq.store.catalog.writer import Again, Change
from arrow_tq.store.compose import ComposedSegment, StepPath, compose
from arrow_tq_schemas.commands import FinalizeSession, SegmentInfo, SegmentInfos
from arrow_tq_schemas.errors import InternalError, SessionClosed, Unsupported
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.names import segment_id

_INSERT_SEGMENT = (
    "INSERT INTO segments (run, segment_id, session, session_id, group_id, view, segment_index,"
    " segment_count, reward, num_tokens, loss_tokens, version_min, version_max, oldest_version,"
    " complete_fields, finish_reason, status, columns, task_set, created_at, updated_at, rev)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'ready', ?, ?, ?, ?, ?)"
)


@dataclass(frozen=True, slots=True)
class Composition:
    """A session's segments, composed from its first ``steps`` steps."""

    reward: float | None
    columns: dict[str, object]
    steps: int
    segments: list[ComposedSegment]
    manifests: list[bytes]


def compose_session(connection: apsw.Connection, run: RunRecord, command: FinalizeSession) -> Composition:
    """Compose from one snapshot; a session that is not open gives no segments (``store_segments`` decides).

    Raises:
        Unsupported: the timeline view.
        NotFound: no such session.
        InvalidInput: the reward or a column.
    """
    if command.view != "lineage":
        raise Unsupported(f"session {command.session_id!r}: the view {command.view!r} is not there yet")
    reward, columns = check_reward(command.reward), parse_columns(command.columns)
    session = get_session(connection, run, command.session_id)
    if session.status != "open":
        return Composition(reward, columns, session.steps, [], [])
    rows = connection.execute(
        "SELECT step_id, sampled_start, sampled_end, version, rewrite_at, receipts FROM steps "
        "WHERE session = ? ORDER BY step_index",
        (session.id,),
    )
    steps = [
        StepPath(
            step_id=step_id,
            sampled=None if start is None else (start, end),
            version=version,
            rewrite_at=rewrite_at,
            receipts=decode_receipts(blob, run.name, run.epoch),
        )
        for step_id, start, end, version, rewrite_at, blob in rows
    ]
    segments = compose(
        steps,
        list(run.fields.values()),
        lambda index: segment_id(command.session_id, command.view, index),
    )
    manifests = [segment.manifest.encode() for segment in segments]
    return Composition(reward, columns, session.steps, segments, manifests)


def store_segments(
    composed: Composition, runs: WriterRuns, command: FinalizeSession
) -> Callable[[Change], SegmentInfos]:
    """The operation that ends the session with these segments, or finds that it did so before."""

    def apply(change: Change) -> SegmentInfos:
        run = runs.get(change, command.run)
        run.check_epoch(command.epoch)
        session = get_session(change.connection, run, command.session_id)
        if session.status == FINALIZED:
            return _finalized_before(change, session, command, composed)
        session.check_open()
        if session.steps != composed.steps:
            raise Again(f"session {session.session_id!r} went on while it was finalized")
        merged = {**json.loads(session.columns), **composed.columns}
        if composed.segments:
            learn_kinds(change, run.id, "segments", merged)
        stored: Any = change.execute("SELECT chunk_id, id FROM chunks WHERE session = ?", (session.id,))
        chunks: dict[bytes, int] = dict(stored)
        names = change.execute("SELECT tasks FROM task_sets WHERE id = ?", (session.task_set,)).get
        tasks: list[str] = json.loads(names)
        text = columns_text(merged)
        for index in range(len(composed.segments)):
            _insert(change, run, session, command, composed, index, text, tasks, chunks)
        change.execute(
            "INSERT INTO finalized VALUES (?, ?, ?, ?)",
            (session.id, command.view, composed.reward, columns_text(composed.columns)),
        )
        take_holds(change, session.id, command.view)
        release_unheld(change, session.id)
        _end(change, session, lasting=bool(tasks) or not composed.segments)
        change.wakes = True
        return _infos(change, session, command.view)

    return apply


def _insert(
    change: Change,
    run: RunRecord,
    session: SessionRow,
    command: FinalizeSession,
    composed: Composition,
    index: int,
    columns: str,
    tasks: list[str],
    chunks: dict[bytes, int],
) -> None:
    segment = composed.segments[index]
    ordered = sorted((version_ordinal(change, run.id, version), version) for version in segment.versions)
    oldest, first, last = (*ordered[0], ordered[-1][1]) if ordered else (None, None, None)
    change.execute(
        _INSERT_SEGMENT,
        (
            *(run.id, segment.manifest.segment_id, session.id, session.session_id, session.group_id),
            *(command.view, index, len(composed.segments), composed.reward),
            *(segment.manifest.num_tokens, segment.loss_tokens, first, last, oldest),
            *(json.dumps(segment.complete_fields), segment.finish_reason, columns, session.task_set),
            *(change.now_us, change.now_us, change.rev),
        ),
    )
    row = change.connection.last_insert_rowid()
    change.execute("INSERT INTO manifests VALUES (?, ?, ?)", (row, composed.manifests[index], change.rev))
    change.executemany(
        "INSERT INTO segment_chunks VALUES (?, ?)",
        [(row, chunk) for chunk in _owned_rows(segment.manifest, chunks)],
    )
    change.executemany(
        "INSERT INTO segment_tasks VALUES (?, ?, ?, ?, ?, NULL)",
        [(row, task, run.id, command.view, "ready") for task in tasks]
        or [(row, NOBODY, run.id, command.view, "held")],
    )


def _owned_rows(manifest: Manifest, chunks: dict[bytes, int]) -> list[int]:
    """Rows of the chunks table for the manifest's owned ids."""
    halves = np.stack([manifest.owned["high"], manifest.owned["low"]], axis=1).astype(">u8").tobytes()
    rows = []
    for place in range(0, len(halves), 16):
        found = chunks.get(halves[place : place + 16])
        if found is None:
            raise InternalError(
                f"segment {manifest.segment_id!r} owns chunk {halves[place : place + 16].hex()}, "
                "which no step of its session attached"
            )
        rows.append(found)
    return rows


def _end(change: Change, session: SessionRow, lasting: bool) -> None:
    """Sessions with tasks last until they are released; others expire."""
    expires_at = None if lasting or session.ttl_us is None else change.now_us + session.ttl_us
    change.execute(
        "UPDATE sessions SET status = 'finalized', updated_at = ?, expires_at = ?, rev = ? WHERE id = ?",
        (change.now_us, expires_at, change.rev, session.id),
    )


def _finalized_before(
    change: Change, session: SessionRow, command: FinalizeSession, composed: Composition
) -> SegmentInfos:
    before = change.execute(
        "SELECT reward, columns FROM finalized WHERE session = ? AND view = ?", (session.id, command.view)
    ).fetchone()
    now = (composed.reward, columns_text(composed.columns))
    if before != now:
        raise SessionClosed(
            f"session {session.session_id!r} is finalized already with reward and columns {before}, "
            f"not {now}; use update for values that come later",
            session_id=session.session_id,
            status=FINALIZED,
        )
    return _infos(change, session, command.view)


def _infos(change: Change, session: SessionRow, view: str) -> SegmentInfos:
    rows = change.execute(
        "SELECT segment_id, num_tokens, loss_tokens, complete_fields, finish_reason FROM segments "
        "WHERE session = ? AND view = ? ORDER BY segment_index",
        (session.id, view),
    )
    return SegmentInfos(
        segments=[
            SegmentInfo(
                segment_id=name,
                session_id=session.session_id,
                num_tokens=tokens,
                loss_tokens=loss,
                complete_fields=json.loads(complete),
                finish_reason=reason,
            )
            for name, tokens, loss, complete, reason in rows
        ]
    )
