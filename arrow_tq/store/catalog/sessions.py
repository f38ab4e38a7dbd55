"""Sessions: opened, opened again, closed groups.

One that is finalized can be opened by its id alone, to be finalized in its other view.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import apsw

from arrow_tq.store.catalog.columns import columns_text, learn_kinds, parse_columns
from arrow_tq.store.catalog.paths import path_ends
from arrow_tq.store.catalog.runs import RunRecord, WriterRuns
from arrow_tq.store.catalog.task_sets import task_set
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.commands import CloseGroup, Done, OpenSession, SessionInfo
from arrow_tq_schemas.errors import Conflict, NotFound, SessionClosed
from arrow_tq_schemas.names import check_id, check_session
from arrow_tq_schemas.trusted import trusted

OPEN = "open"
FINALIZED = "finalized"
SESSION_COLUMNS = (
    "id, session_id, group_id, status, reason, task_set, steps, last_step, columns, ttl_us, fences, rev"
)
"""What a ``SessionRow`` is made of."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """What operations need of a session."""

    id: int
    session_id: str
    group_id: str | None
    status: str
    reason: str | None
    task_set: int
    steps: int
    last_step: str | None
    columns: str
    ttl_us: int | None
    fences: int
    """Steps that may not come any more, because a retry of them came first."""
    rev: int

    def check_open(self) -> None:
        """Raises ``SessionClosed`` naming the status."""
        if self.status != OPEN:
            because = f" ({self.reason})" if self.reason else ""
            raise SessionClosed(
                f"session {self.session_id!r} is {self.status}{because}",
                session_id=self.session_id,
                status=self.status,
            )


def find_session(connection: apsw.Connection, run: RunRecord, session_id: str) -> SessionRow | None:
    """The session's row; None where the run has none of that id."""
    row: Any = connection.execute(
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE run = ? AND session_id = ?", (run.id, session_id)
    ).fetchone()
    return None if row is None else SessionRow(*row)


def get_session(connection: apsw.Connection, run: RunRecord, session_id: str) -> SessionRow:
    """Raises ``NotFound`` naming session and run."""
    found = find_session(connection, run, session_id)
    if found is None:
        raise NotFound(f"run {run.name!r} has no session {session_id!r}", session_id=session_id)
    return found


def open_session(
    change: Change, runs: WriterRuns, command: OpenSession, created: Callable[[str, str], None]
) -> SessionInfo:
    """Create a session, or open it again while it is open; one that is finalized by its id alone.

    Args:
        change: the transaction.
        runs: what is declared.
        command: the session.
        created: told run and session of a new one, before anything else can be committed to it.

    Raises:
        SessionClosed: it has ended; names how.
        Conflict: it is open with another group or other tasks, or its group is closed.
    """
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    check_session(command.session_id)
    if command.group is not None:
        check_id(command.group, "group")
    columns = parse_columns(command.columns)
    found = find_session(change.connection, run, command.session_id)
    if found is None:
        _create(change, run, command, columns)
        change.after.append(lambda: created(command.run, command.session_id))
        return trusted(
            SessionInfo,
            {
                "session_id": command.session_id,
                "group": command.group,
                "status": OPEN,
                "last_step": None,
                "ends": {},
            },
        )
    if found.status != FINALIZED or not _names_alone(command):
        _open_again(change, run, command, columns, found)
    session = get_session(change.connection, run, command.session_id)
    return SessionInfo(
        session_id=session.session_id,
        group=session.group_id,
        status=session.status,
        last_step=session.last_step,
        ends=path_ends(change.connection, session.id, session.last_step),
    )


def close_group(change: Change, runs: WriterRuns, command: CloseGroup) -> Done:
    """No further session joins the group: claims need not wait for ``group_size``. Idempotent."""
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    check_id(command.group, "group")
    change.execute("INSERT OR IGNORE INTO closed_groups VALUES (?, ?)", (run.id, command.group))
    change.wakes = True
    return Done(count=change.connection.changes())


def _create(change: Change, run: RunRecord, command: OpenSession, columns: dict[str, object]) -> None:
    if command.group is not None and _is_closed(change, run, command.group):
        raise Conflict(
            f"session {command.session_id!r}: group {command.group!r} is closed", group=command.group
        )
    names = list(run.tasks) if command.tasks is None else command.tasks
    tasks = task_set(change, run.id, run.tasks, run.fields, names)
    ttl_us = None if command.ttl_s is None else int(command.ttl_s * 1e6)
    learn_kinds(change, run.id, "sessions", columns)
    change.execute(
        "INSERT INTO sessions (run, session_id, group_id, status, task_set, steps, columns, ttl_us,"
        " created_at, updated_at, expires_at, rev) VALUES (?, ?, ?, 'open', ?, 0, ?, ?, ?, ?, ?, ?)",
        (
            *(run.id, command.session_id, command.group, tasks, columns_text(columns), ttl_us),
            *(change.now_us, change.now_us, None if ttl_us is None else change.now_us + ttl_us, change.rev),
        ),
    )


def _names_alone(command: OpenSession) -> bool:
    """Whether a command asks for nothing but the session: whoever says more means to write it."""
    return (command.group, command.tasks, command.ttl_s, command.columns) == (None, None, None, "{}")


def _open_again(
    change: Change, run: RunRecord, command: OpenSession, columns: dict[str, object], found: SessionRow
) -> None:
    found.check_open()
    if command.group is not None and command.group != found.group_id:
        raise Conflict(
            f"session {found.session_id!r} is open in group {found.group_id!r}, not {command.group!r}"
        )
    if command.tasks is not None:
        asked = task_set(change, run.id, run.tasks, run.fields, command.tasks)
        if asked != found.task_set:
            known = change.execute("SELECT tasks FROM task_sets WHERE id = ?", (found.task_set,)).get
            raise Conflict(
                f"session {found.session_id!r} is open for tasks {known}, not {json.dumps(command.tasks)}"
            )
    ttl_us = found.ttl_us if command.ttl_s is None else int(command.ttl_s * 1e6)
    if not columns and command.ttl_s is None:
        return
    learn_kinds(change, run.id, "sessions", columns)
    merged = columns_text({**json.loads(found.columns), **columns})
    change.execute(
        "UPDATE sessions SET columns = ?1, ttl_us = ?2, updated_at = ?3, rev = ?4,"
        " expires_at = CASE WHEN ?5 THEN ?3 + ?2 ELSE expires_at END WHERE id = ?6",
        (merged, ttl_us, change.now_us, change.rev, command.ttl_s is not None, found.id),
    )


def _is_closed(change: Change, run: RunRecord, group: str) -> bool:
    row = change.execute("SELECT 1 FROM closed_groups WHERE run = ? AND group_id = ?", (run.id, group)).get
    return row is not None
