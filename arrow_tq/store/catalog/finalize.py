"""Finalizing: composes a session's segments outside the writer, then stores them in one operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import apsw

from arrow_tq.store.catalog.blobs import held_refs, release_unheld_blobs, show_blobs, take_blob_holds
from arrow_tq.store.catalog.chunk_rows import RELEASED, release_unheld, take_all_holds, take_holds
from arrow_tq.store.catalog.columns import check_reward, columns_text, learn_kinds, parse_columns
from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq.store.catalog.runs import RunRecord, WriterRuns
from arrow_tq.store.catalog.sessions import FINALIZED, OPEN, SessionRow, get_session
from arrow_tq.store.catalog.task_sets import NOBODY
from arrow_tq.store.catalog.versions import version_ordinal
from arrow_tq.store.catalog.writer import Again, Change
from arrow_tq.store.compose import ComposedSegment, TreeStep, compose
from arrow_tq.store.trees import NO_PARENT, on_paths
from arrow_tq_schemas.commands import FinalizeSession, SegmentInfo, SegmentInfos
from arrow_tq_schemas.errors import ChunkReleased, InternalError, SessionClosed
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.names import segment_id
from arrow_tq_schemas.trusted import trusted

_INSERT_SEGMENT = (
    "INSERT INTO segments (run, segment_id, session, session_id, group_id, view, segment_index,"
    " segment_count, reward, num_tokens, loss_tokens, version_min, version_max, oldest_version,"
    " complete_fields, finish_reason, status, columns, task_set, created_at, updated_at, rev)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'ready', ?, ?, ?, ?, ?)"
)
_ChunkRows = dict[bytes, tuple[int, str]]
"""Row and state of a session's chunks by id."""


@dataclass(frozen=True, slots=True)
class Composition:
    """A session's segments in one view, composed from its steps as they were at revision ``rev``."""

    reward: float | None
    columns: dict[str, object]
    rev: int
    """Of the session's row, which every change of its tree touches."""
    segments: list[ComposedSegment]
    manifests: list[bytes]
    blobs: list[list[int]]
    """By segment, the references to blobs of the steps on its path."""
    refers: bool
    """Whether any step holds a reference to a blob."""


def compose_session(connection: apsw.Connection, run: RunRecord, command: FinalizeSession) -> Composition:
    """Compose from one snapshot. Where there is nothing to compose (the session was aborted, the view
    is finalized already), there are no segments, and ``store_segments`` decides.

    Raises:
        NotFound: no such session.
        InvalidInput: the reward or a column.
    """
    reward, columns = check_reward(command.reward), parse_columns(command.columns)
    session = get_session(connection, run, command.session_id)
    if session.status not in (OPEN, FINALIZED) or _before(connection, session, command.view) is not None:
        return Composition(reward, columns, session.rev, [], [], [], True)
    steps = _read_tree(connection, run, session.id)
    segments = compose(
        steps,
        list(run.fields.values()),
        lambda index: segment_id(command.session_id, command.view, index),
        command.view,
    )
    manifests = [segment.manifest.encode() for segment in segments]
    refs = held_refs(connection, session.id)
    by_step = {place: refs[step.step_id] for place, step in enumerate(steps) if step.step_id in refs}
    blobs = on_paths([step.parent for step in steps], by_step, [segment.last for segment in segments])
    return Composition(reward, columns, session.rev, segments, manifests, blobs, bool(refs))


def _read_tree(connection: apsw.Connection, run: RunRecord, session: int) -> list[TreeStep]:
    """The session's steps that count, in commit order."""
    rows = connection.execute(
        "SELECT step_id, parent_id, sampled_start, sampled_end, version, rewrite_at, cut, receipts "
        "FROM steps WHERE session = ? AND status = 'committed' ORDER BY step_index",
        (session,),
    )
    steps: list[TreeStep] = []
    places: dict[str, int] = {}
    for step_id, parent, start, end, version, rewrite_at, cut, blob in rows:
        places[step_id] = len(steps)
        steps.append(
            TreeStep(
                step_id=step_id,
                parent=NO_PARENT if parent is None else places[parent],
                sampled=None if start is None else (start, end),
                version=version,
                rewrite_at=rewrite_at,
                cut=cut,
                receipts=decode_receipts(blob, run.name, run.epoch),
            )
        )
    return steps


def store_segments(
    composed: Composition, runs: WriterRuns, command: FinalizeSession
) -> Callable[[Change], SegmentInfos]:
    """The operation that ends the session with these segments, or finds that it did so before.

    A session that is finalized in one view can still be in the other, while all of it is there.
    """

    def apply(change: Change) -> SegmentInfos:
        run = runs.get(change, command.run)
        run.check_epoch(command.epoch)
        session = get_session(change.connection, run, command.session_id)
        before = _before(change.connection, session, command.view)
        if before is not None:
            return _finalized_before(change, session, command, composed, before)
        if session.status != FINALIZED:
            session.check_open()
        if session.rev != composed.rev:
            raise Again(f"session {session.session_id!r} went on while it was finalized")
        merged = {**parse_columns(session.columns), **composed.columns}
        if composed.segments:
            learn_kinds(change, run.id, "segments", merged)
        chunks = _chunk_rows(change, session.id)
        tasks = runs.task_names(change, session.task_set)
        text = columns_text(merged)
        for index in range(len(composed.segments)):
            _insert(change, run, session, command, composed, index, text, tasks, chunks)
        change.execute(
            "INSERT INTO finalized VALUES (?, ?, ?, ?)",
            (session.id, command.view, composed.reward, columns_text(composed.columns)),
        )
        if _owns_all(composed, chunks):
            take_all_holds(change, session.id, session.task_set)
        else:
            take_holds(change, session.id, command.view)
            release_unheld(change, session.id)
        if any(composed.blobs):
            take_blob_holds(change, session.id, command.view)
        if composed.refers:
            release_unheld_blobs(change, session.id)
        _end(change, session, lasting=bool(tasks) or not composed.segments)
        change.wakes = True
        return _composed_infos(session, composed)

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
    chunks: _ChunkRows,
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
    show_blobs(change, row, composed.blobs[index])
    change.executemany(
        "INSERT INTO segment_tasks VALUES (?, ?, ?, ?, ?, NULL)",
        [(row, task, run.id, command.view, "ready") for task in tasks]
        or [(row, NOBODY, run.id, command.view, "held")],
    )


def _chunk_rows(change: Change, session: int) -> _ChunkRows:
    return {
        chunk_id: (row, state)
        for chunk_id, row, state in change.execute(
            "SELECT chunk_id, id, state FROM chunks WHERE session = ?", (session,)
        )
    }


def _owned_rows(manifest: Manifest, chunks: _ChunkRows) -> list[int]:
    """Rows of the chunks table for the manifest's owned ids.

    Raises:
        ChunkReleased: segments of the other view were trained or discarded, and freed one, before.
    """
    rows = []
    for high, low in manifest.owned.tolist():
        chunk_id = (high << 64 | low).to_bytes(16, "big")
        row, state = chunks.get(chunk_id, (0, None))
        if state is None:
            raise InternalError(
                f"segment {manifest.segment_id!r} owns chunk {chunk_id.hex()}, "
                "which no step of its session attached"
            )
        if state == RELEASED:
            raise ChunkReleased(
                f"segment {manifest.segment_id!r}: chunk {chunk_id.hex()} was released by the segments of "
                "another view: finalize each view before another's segments are released or discarded",
                ids=[chunk_id.hex()],
            )
        rows.append(row)
    return rows


def _owns_all(composed: Composition, chunks: _ChunkRows) -> bool:
    """Whether one new segment owns every chunk of its session: then each is held by someone."""
    segments = composed.segments
    return len(segments) == 1 and len(segments[0].manifest.owned) == len(chunks)


def _end(change: Change, session: SessionRow, lasting: bool) -> None:
    """Sessions with tasks last until they are released; others expire."""
    expires_at = None if lasting or session.ttl_us is None else change.now_us + session.ttl_us
    change.execute(
        "UPDATE sessions SET status = 'finalized', updated_at = ?, expires_at = ?, rev = ? WHERE id = ?",
        (change.now_us, expires_at, change.rev, session.id),
    )


def _before(connection: apsw.Connection, session: SessionRow, view: str) -> tuple[object, ...] | None:
    """Reward and columns with which the view was finalized; None: it was not."""
    if session.status == OPEN:
        return None
    found: Any = connection.execute(
        "SELECT reward, columns FROM finalized WHERE session = ? AND view = ?", (session.id, view)
    ).fetchone()
    return None if found is None else tuple(found)


def _finalized_before(
    change: Change,
    session: SessionRow,
    command: FinalizeSession,
    composed: Composition,
    before: tuple[object, ...],
) -> SegmentInfos:
    now = (composed.reward, columns_text(composed.columns))
    if before != now:
        raise SessionClosed(
            f"session {session.session_id!r} is finalized already with reward and columns {before} in the "
            f"view {command.view!r}, not {now}; use update for values that come later",
            session_id=session.session_id,
            status=FINALIZED,
        )
    return _infos(change, session, command.view)


def _composed_infos(session: SessionRow, composed: Composition) -> SegmentInfos:
    """What ``_infos`` reads, without reading it."""
    infos = [
        trusted(
            SegmentInfo,
            {
                "segment_id": segment.manifest.segment_id,
                "session_id": session.session_id,
                "num_tokens": segment.manifest.num_tokens,
                "loss_tokens": segment.loss_tokens,
                "complete_fields": list(segment.complete_fields),
                "finish_reason": segment.finish_reason,
            },
        )
        for segment in composed.segments
    ]
    return trusted(SegmentInfos, {"segments": infos})


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
