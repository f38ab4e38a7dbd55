"""The tree that a session's steps form: where a step goes, what a retry replaces, what is abandoned.

Every step counts unless it is *abandoned* (``abandon``) or *superseded* (a step committed later is its
retry); either takes along all that follows it, and frees what those wrote. A step that was left out
stays so: nothing can follow it, and its id is never used for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from arrow_tq.store.catalog.blobs import release_blobs_of
from arrow_tq.store.catalog.chunk_rows import release_chunks
from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq.store.catalog.runs import WriterRuns
from arrow_tq.store.catalog.sessions import SessionRow, get_session
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.commands import AbandonStep, Done, StepCommit
from arrow_tq_schemas.errors import Conflict, NotFound
from arrow_tq_schemas.names import check_id

COMMITTED = "committed"
ABANDONED = "abandoned"
SUPERSEDED = "superseded"
ROOT = ""
"""As a step's ``parent``: it follows no step."""


def find_parent(
    connection: apsw.Connection, session: SessionRow, step_id: str, parent: str | None, retry_of: str | None
) -> str | None:
    """The step that a new one follows; None: it begins a tree of its own.

    A retry goes where the step that it replaces went, or an earlier retry of it. Where none of these was
    committed, ``parent`` decides as for any step.

    Raises:
        NotFound: there is no such parent.
        Conflict: the parent was left out, or is not that of the step that is retried.
    """
    if retry_of is not None:
        found: Any = connection.execute(
            "SELECT parent_id FROM steps WHERE session = ?1 AND (step_id = ?2 OR retry_of = ?2) "
            "ORDER BY step_id <> ?2, step_index LIMIT 1",
            (session.id, retry_of),
        ).fetchone()
        if found is not None:
            return _parent_of_retry(connection, session, step_id, parent, retry_of, found[0])
    if parent is None or parent == session.last_step:
        return session.last_step
    if parent == ROOT:
        return None
    _check_live(connection, session, step_id, parent)
    return parent


def cut_reason(connection: apsw.Connection, session: int, parent: str, step: StepCommit) -> str | None:
    """``tools`` where they changed on the way to a step; None where they did not, or nobody said."""
    if step.tools is None:
        return None
    at: Any = parent
    while at is not None:
        row: Any = connection.execute(
            "SELECT parent_id, tools_hash FROM steps WHERE session = ? AND step_id = ?", (session, at)
        ).fetchone()
        at, tools = row
        if tools is not None:
            return None if tools == step.tools else "tools"
    return None


def check_fence(connection: apsw.Connection, session: SessionRow, step_id: str) -> None:
    """Raises ``Conflict`` for an attempt that comes after its retry."""
    if not session.fences:
        return
    later = connection.execute(
        "SELECT superseded_by FROM fences WHERE session = ? AND step_id = ?", (session.id, step_id)
    ).get
    if later is not None:
        raise Conflict(
            f"step {step_id!r} of session {session.session_id!r} comes late: its retry {later!r} was "
            "committed before it",
            step_id=step_id,
            superseded_by=later,
        )


def supersede(change: Change, session: SessionRow, retry_of: str, step_id: str) -> None:
    """``step_id`` replaces ``retry_of`` and what was committed as a retry of it before.

    Where ``retry_of`` has not been committed yet, it never will be: it comes too late.
    """
    earlier: Any = change.execute(
        "SELECT step_id FROM steps WHERE session = ? AND retry_of = ? AND step_id <> ? "
        "AND status = 'committed'",
        (session.id, retry_of, step_id),
    ).fetchall()
    for (other,) in earlier:
        leave_out(change, session.id, other, SUPERSEDED)
    known = change.execute(
        "SELECT 1 FROM steps WHERE session = ? AND step_id = ?", (session.id, retry_of)
    ).get
    if known is not None:
        leave_out(change, session.id, retry_of, SUPERSEDED)
        return
    change.execute("INSERT OR IGNORE INTO fences VALUES (?, ?, ?)", (session.id, retry_of, step_id))
    change.execute("UPDATE sessions SET fences = fences + 1 WHERE id = ?", (session.id,))


def abandon_step(change: Change, runs: WriterRuns, command: AbandonStep) -> Done:
    """Leave a step, and all that follows it, out of every view. Counts the steps; again: none.

    Raises:
        NotFound: the session has no such step.
        SessionClosed: it has ended.
    """
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    check_id(command.step_id, "step id")
    session = get_session(change.connection, run, command.session_id)
    status = change.execute(
        "SELECT status FROM steps WHERE session = ? AND step_id = ?", (session.id, command.step_id)
    ).get
    if status is None:
        raise NotFound(
            f"session {session.session_id!r} has no step {command.step_id!r}", step_id=command.step_id
        )
    if status != COMMITTED:
        return Done(count=0)
    session.check_open()
    count = leave_out(change, session.id, command.step_id, ABANDONED)
    last = change.execute(
        "SELECT step_id FROM steps WHERE session = ? AND status = 'committed' "
        "ORDER BY step_index DESC LIMIT 1",
        (session.id,),
    ).get
    change.execute(
        "UPDATE sessions SET last_step = ?, updated_at = ?, rev = ? WHERE id = ?",
        (last, change.now_us, change.rev, session.id),
    )
    return Done(count=count)


def leave_out(change: Change, session: int, step_id: str, status: str) -> int:
    """Mark a step and what follows it, as far as it counts, and free its chunks. Says how many steps."""
    rows: Any = change.execute(
        "SELECT id, step_id, parent_id, receipts FROM steps WHERE session = ?1 AND status = 'committed' AND "
        "step_index >= (SELECT step_index FROM steps WHERE session = ?1 AND step_id = ?2) "
        "ORDER BY step_index",
        (session, step_id),
    )
    gone: set[str] = set()
    marked: list[int] = []
    chunks: list[bytes] = []
    for row, name, parent, blob in rows:
        # A step comes after its parent, so one pass finds the whole subtree.
        if name == step_id or parent in gone:
            gone.add(name)
            marked.append(row)
            chunks += _chunks(blob)
    change.executemany(
        "UPDATE steps SET status = ?, rev = ? WHERE id = ?", [(status, change.rev, row) for row in marked]
    )
    release_chunks(change, chunks)
    release_blobs_of(change, marked)
    return len(marked)


def _parent_of_retry(
    connection: apsw.Connection,
    session: SessionRow,
    step_id: str,
    parent: str | None,
    retry_of: str,
    own: str | None,
) -> str | None:
    """The retried step's parent, which must agree with what the caller said, and still count."""
    if parent is not None and parent != (own or ROOT):
        raise Conflict(
            f"step {step_id!r} retries {retry_of!r}, whose parent is {own!r}, not {parent!r}", parent=parent
        )
    if own is not None:
        _check_live(connection, session, step_id, own)
    return own


def _check_live(connection: apsw.Connection, session: SessionRow, step_id: str, parent: str) -> None:
    status = connection.execute(
        "SELECT status FROM steps WHERE session = ? AND step_id = ?", (session.id, parent)
    ).get
    if status is None:
        raise NotFound(
            f"step {step_id!r}: session {session.session_id!r} has no step {parent!r}", parent=parent
        )
    if status != COMMITTED:
        raise Conflict(
            f"step {step_id!r}: its parent {parent!r} is {status}: nothing follows it",
            parent=parent,
            status=status,
        )


def _chunks(blob: bytes) -> Sequence[bytes]:
    return [bytes.fromhex(chunk.id) for receipt in decode_receipts(blob, "", 0) for chunk in receipt.chunks]
