"""Sessions and claims as they were written: what an export is made of."""

from __future__ import annotations

import json
from typing import Any

import apsw

from arrow_tq.store.catalog.claims import GONE, claim_table
from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq.store.catalog.runs import RunRecord
from arrow_tq.store.catalog.sessions import get_session
from arrow_tq_schemas.blobs import StepBlob
from arrow_tq_schemas.commands import (
    ClaimInfo,
    FinalizedView,
    GetClaim,
    GetSession,
    RecordedStep,
    Reply,
    SessionRecord,
)
from arrow_tq_schemas.errors import ClaimGone

PAGE_BYTES = 8 << 20
"""Messages and receipts of one page, about: a step more than that."""


def answer(connection: apsw.Connection, run: RunRecord, command: GetSession | GetClaim) -> Reply:
    """Raises ``NotFound`` or ``ClaimGone``."""
    if isinstance(command, GetSession):
        return Reply(body=read_session(connection, run, command))
    info, ipc = read_claim(connection, run, command)
    return Reply(body=info, blobs=[ipc])


def read_session(connection: apsw.Connection, run: RunRecord, command: GetSession) -> SessionRecord:
    """A session and a page of its steps that count, in commit order.

    Raises:
        NotFound: no such session.
    """
    session = get_session(connection, run, command.session_id)
    tasks = connection.execute("SELECT tasks FROM task_sets WHERE id = ?", (session.task_set,)).get
    views: Any = connection.execute(
        "SELECT view, reward, columns FROM finalized WHERE session = ? ORDER BY view", (session.id,)
    )
    versions: Any = connection.execute(
        "SELECT version FROM versions WHERE run = ? ORDER BY ordinal", (run.id,)
    )
    steps, after = _page(connection, run, session.id, command.first_step)
    return SessionRecord(
        session_id=session.session_id,
        group=session.group_id,
        status=session.status,
        tasks=json.loads(tasks),
        columns=session.columns,
        views=[FinalizedView(view=view, reward=reward, columns=columns) for view, reward, columns in views],
        versions=[version for (version,) in versions],
        steps=steps,
        next_step=after,
    )


def read_claim(connection: apsw.Connection, run: RunRecord, command: GetClaim) -> tuple[ClaimInfo, bytes]:
    """A claim and its table, without joining it.

    Raises:
        ClaimGone: there is no such claim, it expired, or the run was rewound since.
    """
    row: Any = connection.execute(
        "SELECT task, view, segments, lease_s, state FROM claims WHERE run = ? AND claim_id = ?",
        (run.id, command.claim_id),
    ).fetchone()
    if row is None or row[4] in GONE:
        state = "" if row is None else f": it is {row[4]}"
        raise ClaimGone(f"run {run.name!r} has no claim {command.claim_id} any more{state}")
    task, view, segments, lease_s, _ = row
    info = ClaimInfo(
        claim_id=command.claim_id, run=run.name, task=task, view=view, segments=segments, lease_s=lease_s
    )
    return info, claim_table(connection, run, command.claim_id)


def _page(
    connection: apsw.Connection, run: RunRecord, session: int, first: int
) -> tuple[list[RecordedStep], int | None]:
    rows: Any = connection.execute(
        "SELECT id, step_index, step_id, parent_id, messages, version, sampled_start, sampled_end,"
        " tools_hash, retry_of, cut, receipts FROM steps "
        "WHERE session = ? AND status = 'committed' AND step_index >= ? ORDER BY step_index",
        (session, first),
    )
    steps: list[RecordedStep] = []
    size = 0
    for row, index, name, parent, messages, version, start, end, tools, retry_of, cut, blob in rows:
        if size >= PAGE_BYTES:
            return steps, index
        size += len(messages) + 4 * len(blob)
        steps.append(
            RecordedStep(
                step_id=name,
                parent=parent or "",
                messages=messages,
                version=version,
                sampled=None if start is None else (start, end),
                receipts=decode_receipts(blob, run.name, run.epoch),
                tools=tools,
                retry_of=retry_of,
                extends=cut == "mismatch",
                blobs=_blobs(connection, row),
            )
        )
    return steps, None


def _blobs(connection: apsw.Connection, step: int) -> list[StepBlob]:
    """The files that a step refers to, in the order of attaching, as far as they are there."""
    rows: Any = connection.execute(
        "SELECT lower(hex(blob_id)), step_blobs.media_type, bytes FROM step_blobs "
        "JOIN blobs ON blobs.id = step_blobs.blob "
        "WHERE step = ? AND step_blobs.state = 'held' ORDER BY place",
        (step,),
    )
    return [StepBlob(blob_id=name, media_type=kind, bytes=size) for name, kind, size in rows]
