"""Ending what will never be trained: discard, abort, expiry. Rows stay, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arrow_tq.store.catalog.blobs import release_unheld_blobs
from arrow_tq.store.catalog.chunk_rows import drop_holds, release_unheld
from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.kept import forget_segments
from arrow_tq.store.catalog.other_views import give_up_other_views
from arrow_tq.store.catalog.runs import WriterRuns
from arrow_tq.store.catalog.segment_names import Named, resolve_names
from arrow_tq.store.catalog.segments import Clause
from arrow_tq.store.catalog.sessions import OPEN, SessionRow, get_session
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.commands import AbortSession, Discard, Done
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.names import check_id


def discard(change: Change, runs: WriterRuns, command: Discard, clause: Clause) -> Done:
    """Discard segments, and end open sessions, by id or predicate; counts the rows that it changed.

    A segment that is done for every task was trained, and stays as it is. ``clause`` is the compiled
    ``where``.

    Raises:
        InvalidInput: ids and ``where`` both, or neither.
        NotFound: an unknown id; nothing was changed.
    """
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    reason = check_id(command.reason, "reason")
    if command.ids is not None and command.where is None:
        named = resolve_names(change.connection, run, command.ids, command.view)
    elif command.where is not None and command.ids is None:
        sql, values = clause
        chosen = change.execute(
            f"SELECT segments.id FROM segments WHERE segments.run = ? AND segments.view = ? AND {sql}",
            (run.id, command.view, *values),
        )
        named = Named([row for (row,) in chosen], [])
    else:
        raise InvalidInput("discard: give ids or where, one of the two")
    count = discard_segments(change, named.segments, reason)
    for session in named.sessions:
        if session.status == OPEN:
            end_session(change, session, "discarded", reason)
            count += 1
    return Done(count=count)


def abort_session(change: Change, runs: WriterRuns, command: AbortSession) -> Done:
    """End an open session and free what it wrote. Aborting it again does nothing.

    Raises:
        SessionClosed: it ended in another way.
    """
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    reason = check_id(command.reason, "reason")
    session = get_session(change.connection, run, command.session_id)
    if session.status == "aborted":
        return Done(count=0)
    session.check_open()
    end_session(change, session, "aborted", reason)
    return Done(count=1)


def discard_segments(change: Change, rows: Sequence[int], reason: str) -> int:
    """Discard those of these segments that are not done or discarded yet; says how many."""
    if not rows:
        return 0
    live: list[Any] = [
        row
        for (row,) in change.execute(
            "SELECT id FROM segments WHERE id IN (SELECT value FROM json_each(?)) "
            "AND status NOT IN ('done', 'discarded')",
            (row_list(rows),),
        )
    ]
    chosen = row_list(live)
    pairs = "segment_tasks.segment IN (SELECT value FROM json_each(?)) AND segment_tasks.state <> 'done'"
    drop_holds(change, pairs, (chosen,))
    forget_segments(change, live)
    change.execute(f"UPDATE segment_tasks SET state = 'discarded' WHERE {pairs}", (chosen,))
    change.execute(
        "UPDATE segments SET status = 'discarded', reason = ?, updated_at = ?, rev = ? "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (reason, change.now_us, change.rev, chosen),
    )
    give_up_other_views(change, live)
    _count(change, reason, len(live))
    # What is left of its session or group may be whole now.
    change.wakes = True
    return len(live)


def end_session(change: Change, session: SessionRow, status: str, reason: str) -> None:
    """End an open session without segments, and free its chunks."""
    change.execute(
        "UPDATE sessions SET status = ?, reason = ?, updated_at = ?, expires_at = NULL, rev = ? WHERE id = ?",
        (status, reason, change.now_us, change.rev, session.id),
    )
    release_unheld(change, session.id)
    release_unheld_blobs(change, session.id)
    _count(change, reason, 1)
    change.wakes = True


def _count(change: Change, reason: str, count: int) -> None:
    if count:
        change.execute(
            "INSERT INTO discards VALUES (?, ?) "
            "ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count",
            (reason, count),
        )
