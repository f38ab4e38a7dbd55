"""Checkpoints: marks that a trainer sets when it saves, and the way back to one after a restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import apsw

from arrow_tq.store.catalog import kept
from arrow_tq.store.catalog.claims import ACTIVE, REWOUND
from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.discards import end_session
from arrow_tq.store.catalog.runs import CommittedRuns, RunRecord, WriterRuns
from arrow_tq.store.catalog.sessions import SESSION_COLUMNS, SessionRow
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.commands import LostSession, Mark, MarkInfo, Rewind, Rewound
from arrow_tq_schemas.errors import MarkSpent, NotFound
from arrow_tq_schemas.names import check_id

MARKS_NAMED_MAX = 10
_KEPT = "SELECT segment, task FROM kept WHERE run = ? AND mark >= ?"


@dataclass(frozen=True, slots=True)
class MarkRow:
    """A mark that was not left behind by a rewind."""

    id: int
    name: str
    epoch: int
    policy_version: str | None
    status: str
    reason: str | None
    at_rev: int
    """The transaction that made it."""

    def info(self, run: str, freed: int = 0) -> MarkInfo:
        return MarkInfo(
            run=run,
            name=self.name,
            epoch=self.epoch,
            policy_version=self.policy_version,
            status=self.status,
            freed=freed,
        )


def mark(change: Change, runs: WriterRuns, command: Mark, keep_marks: int) -> MarkInfo:
    """Note that the trainer saved; free what marks more than ``keep_marks`` back keep. Idempotent by name."""
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    name = check_id(command.name, "mark")
    known = _find(change.connection, run, name)
    if known is not None:
        return known.info(run.name)
    change.execute(
        "INSERT INTO marks (run, mark, epoch, policy_version, status, keeps, kept_segments, at_rev,"
        " created_at, updated_at, rev) VALUES (?, ?, ?, ?, 'live', ?, 0, ?, ?, ?, ?)",
        (
            *(run.id, name, run.epoch, run.policy_version, keep_marks > 0, change.rev),
            *(change.now_us, change.now_us, change.rev),
        ),
    )
    outlived = change.execute(
        "SELECT id FROM marks WHERE run = ? AND status = 'live' ORDER BY id DESC LIMIT 1 OFFSET ?",
        (run.id, max(keep_marks, 1)),
    ).get
    freed = 0 if outlived is None else kept.spend(change, run.id, outlived, f"mark {name} came after it")
    made = _find(change.connection, run, name)
    assert made is not None
    return made.info(run.name, freed)


def rewind(change: Change, runs: WriterRuns, committed: CommittedRuns, command: Rewind) -> Rewound:
    """Open what was released or claimed since a mark again, under a new epoch; end what is in flight.

    Raises:
        NotFound: no such mark; names those that there are.
        MarkSpent: what was released since it is not kept any more; names why, and the marks that are left.
        StaleEpoch: somebody rewound the run, or advanced its epoch, before.
    """
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    found = _rewindable(change.connection, run, check_id(command.name, "mark"))
    lost = _ended_since(change.connection, run, found.at_rev)
    segments = _open_again(change, run, found)
    lost += _end_open_sessions(change, run)
    change.execute(
        "UPDATE marks SET status = 'rewound', kept_segments = 0, updated_at = ?, rev = ? "
        "WHERE run = ? AND id > ? AND status <> 'rewound'",
        (change.now_us, change.rev, run.id, found.id),
    )
    change.execute(
        "UPDATE marks SET kept_segments = 0, updated_at = ?, rev = ? WHERE id = ?",
        (change.now_us, change.rev, found.id),
    )
    epoch = run.epoch + 1
    change.execute(
        "UPDATE runs SET epoch = ?, policy_version = ?, rev = ? WHERE id = ?",
        (epoch, found.policy_version, change.rev, run.id),
    )
    runs.touched(change, run.name)
    change.after.append(committed.forget)
    change.wakes = True
    return Rewound(
        run=run.name,
        name=found.name,
        epoch=epoch,
        policy_version=found.policy_version,
        segments=segments,
        sessions=lost,
    )


def _open_again(change: Change, run: RunRecord, found: MarkRow) -> list[str]:
    """Give back every claim under way, and every pair released since the mark; names the segments."""
    claims: list[Any] = [
        row
        for (row,) in change.execute(
            "SELECT id FROM claims WHERE run = ? AND state = ? UNION "
            "SELECT pair.claim FROM kept JOIN segment_tasks AS pair USING (segment, task) "
            "WHERE kept.run = ? AND mark >= ? AND pair.claim IS NOT NULL",
            (run.id, ACTIVE, run.id, found.id),
        )
    ]
    rows: list[Any] = [
        row
        for (row,) in change.execute(
            f"SELECT segment FROM ({_KEPT}) UNION SELECT segment FROM segment_tasks "
            "WHERE state = 'claimed' AND claim IN (SELECT value FROM json_each(?))",
            (run.id, found.id, row_list(claims)),
        )
    ]
    change.execute(
        f"UPDATE segment_tasks SET state = 'ready', claim = NULL WHERE (segment, task) IN ({_KEPT})",
        (run.id, found.id),
    )
    change.execute(
        "UPDATE segment_tasks SET state = 'ready', claim = NULL "
        "WHERE state = 'claimed' AND claim IN (SELECT value FROM json_each(?))",
        (row_list(claims),),
    )
    change.execute("DELETE FROM kept WHERE run = ? AND mark >= ?", (run.id, found.id))
    change.execute(
        "UPDATE claims SET state = ?, rev = ? WHERE id IN (SELECT value FROM json_each(?))",
        (REWOUND, change.rev, row_list(claims)),
    )
    change.execute(
        "DELETE FROM claim_tables WHERE claim IN (SELECT value FROM json_each(?))", (row_list(claims),)
    )
    change.execute(
        "UPDATE segments SET status = CASE WHEN EXISTS (SELECT 1 FROM segment_tasks"
        " WHERE segment = segments.id AND state <> 'done') THEN 'ready' ELSE 'done' END,"
        " reason = NULL, updated_at = ?, rev = ? "
        "WHERE status <> 'discarded' AND id IN (SELECT value FROM json_each(?))",
        (change.now_us, change.rev, row_list(rows)),
    )
    return [
        name
        for (name,) in change.execute(
            "SELECT segment_id FROM segments WHERE status = 'ready' "
            "AND id IN (SELECT value FROM json_each(?)) ORDER BY id",
            (row_list(rows),),
        )
    ]


def _end_open_sessions(change: Change, run: RunRecord) -> list[LostSession]:
    """End what is in flight: its writers are of the old epoch, and ids are never used twice."""
    rows: list[Any] = change.execute(
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE status = 'open' AND run = ? ORDER BY id", (run.id,)
    ).fetchall()
    lost = []
    for row in rows:
        session = SessionRow(*row)
        end_session(change, session, "discarded", REWOUND)
        lost.append(LostSession(session_id=session.session_id, group=session.group_id, reason=REWOUND))
    return lost


def _ended_since(connection: apsw.Connection, run: RunRecord, rev: int) -> list[LostSession]:
    """Sessions that ended without segments, or lost some to a discard, after a transaction."""
    rows: Any = connection.execute(
        "SELECT session_id, group_id, min(reason) FROM ("
        " SELECT id, session_id, group_id, coalesce(reason, status) AS reason FROM sessions"
        " WHERE run = ?1 AND rev > ?2 AND status IN ('aborted', 'discarded', 'expired') UNION ALL"
        " SELECT session, session_id, group_id, coalesce(reason, status) FROM segments"
        " WHERE run = ?1 AND rev > ?2 AND status = 'discarded') GROUP BY id ORDER BY id",
        (run.id, rev),
    )
    return [LostSession(session_id=session, group=group, reason=reason) for session, group, reason in rows]


def _rewindable(connection: apsw.Connection, run: RunRecord, name: str) -> MarkRow:
    found = _find(connection, run, name)
    if found is not None and found.status == kept.LIVE:
        return found
    named: Any = connection.execute(
        "SELECT mark FROM marks WHERE run = ? AND status = 'live' ORDER BY id DESC LIMIT ?",
        (run.id, MARKS_NAMED_MAX),
    )
    live = [one for (one,) in named]
    left = (
        f"it can be rewound to {', '.join(map(repr, live))}" if live else "no mark of it is left to rewind to"
    )
    if found is None:
        raise NotFound(f"run {run.name!r} has no mark {name!r}; {left}", mark=name, live=live)
    raise MarkSpent(
        f"run {run.name!r}: what was released since mark {name!r} is not kept any more: {found.reason}; "
        f"{left}",
        mark=name,
        reason=found.reason,
        live=live,
    )


def _find(connection: apsw.Connection, run: RunRecord, name: str) -> MarkRow | None:
    row: Any = connection.execute(
        "SELECT id, mark, epoch, policy_version, status, reason, at_rev FROM marks "
        "WHERE run = ? AND mark = ? AND status <> 'rewound'",
        (run.id, name),
    ).fetchone()
    return None if row is None else MarkRow(*row)
