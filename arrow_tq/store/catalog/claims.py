"""Claims as rows: taken, given back, done."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import apsw

from arrow_tq.calls import write_table
from arrow_tq.store.catalog.columns import read_kinds
from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.kept import give_up
from arrow_tq.store.catalog.other_views import give_up_other_views
from arrow_tq.store.catalog.runs import RunRecord, WriterRuns
from arrow_tq.store.catalog.segment_rows import segment_table
from arrow_tq.store.catalog.writer import Again, Change
from arrow_tq_schemas.commands import Claim, ClaimInfo, View
from arrow_tq_schemas.errors import ClaimGone, Conflict, LimitTooSmall

ACTIVE = "active"
GONE = ("expired", "rewound")
REWOUND = "rewound"
_STATUS = (
    "UPDATE segments SET updated_at = ?, rev = ?, status = (SELECT CASE"
    " WHEN sum(state = 'claimed') > 0 THEN 'claimed' WHEN sum(state <> 'done') = 0 THEN 'done'"
    " ELSE 'ready' END FROM segment_tasks WHERE segment = segments.id)"
    " WHERE status <> 'discarded' AND id IN (SELECT segment FROM claim_segments WHERE claim = ?)"
)


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A claim that is active."""

    id: int
    claim_id: str
    task: str
    view: View
    segments: int
    lease_s: float
    world: int | None

    def info(self, run: str) -> ClaimInfo:
        return ClaimInfo(
            claim_id=self.claim_id,
            run=run,
            task=self.task,
            view=self.view,
            segments=self.segments,
            lease_s=self.lease_s,
        )


def take(
    runs: WriterRuns, command: Claim, task: str, view: View, rows: Sequence[int]
) -> Callable[[Change], ClaimInfo]:
    """The operation that claims these segments for ``task``; of none, an empty claim that ranks can join.

    Raises:
        Again: one of them is not ready any more.
        StaleEpoch: the claimer is from before a rewind, or another advance of the epoch.
    """

    def apply(change: Change) -> ClaimInfo:
        run = runs.get(change, command.run)
        if command.epoch is not None:
            run.check_epoch(command.epoch)
        claim_id = uuid.uuid4().hex
        expires_at = change.now_us + int(command.lease_s * 1e6)
        change.execute(
            "INSERT INTO claims (claim_id, run, task, view, segments, lease_s, expires_at, state, created_at,"
            " rev) VALUES (?, ?, ?, ?, ?, ?, ?, 'active', ?, ?)",
            (
                *(claim_id, run.id, task, view, len(rows), command.lease_s, expires_at),
                *(change.now_us, change.rev),
            ),
        )
        claim = change.connection.last_insert_rowid()
        change.execute(
            "UPDATE segment_tasks SET state = 'claimed', claim = ? "
            "WHERE segment IN (SELECT value FROM json_each(?)) AND task = ? AND state = 'ready'",
            (claim, row_list(rows), task),
        )
        if change.connection.changes() != len(rows):
            raise Again("a chosen segment is not ready any more")
        change.executemany(
            "INSERT INTO claim_segments VALUES (?, ?, ?)",
            [(claim, position, row) for position, row in enumerate(rows)],
        )
        change.execute(_STATUS, (change.now_us, change.rev, claim))
        return ClaimRow(claim, claim_id, task, view, len(rows), command.lease_s, None).info(run.name)

    return apply


def rows_like(
    connection: apsw.Connection, run: RunRecord, like: str, task: str, limit: int
) -> tuple[View, list[int]]:
    """View and segments of another claim, for ``task`` to take; those discarded since are left out.

    Raises:
        ClaimGone: there is no such claim, its lease expired, or the run was rewound since.
        Conflict: a segment is not ready for the task; names it.
        LimitTooSmall: it has more segments than ``limit``.
    """
    found: Any = connection.execute(
        "SELECT id, view, state FROM claims WHERE run = ? AND claim_id = ?", (run.id, like)
    ).fetchone()
    if found is None or found[2] in GONE:
        state = "" if found is None else f": it is {found[2]}"
        raise ClaimGone(f"run {run.name!r} has no claim {like} any more{state}", claim_id=like)
    rows: list[Any] = connection.execute(
        "SELECT segments.id, segments.segment_id, segment_tasks.state FROM claim_segments "
        "JOIN segments ON segments.id = claim_segments.segment "
        "LEFT JOIN segment_tasks ON segment_tasks.segment = segments.id AND segment_tasks.task = ? "
        "WHERE claim_segments.claim = ? AND segments.status <> 'discarded' ORDER BY position",
        (task, found[0]),
    ).fetchall()
    for _, name, state in rows:
        if state != "ready":
            raise Conflict(
                f"segment {name!r} of claim {like} is {state or 'not'} for task {task!r}: expected ready",
                segment_id=name,
                state=state,
            )
    if len(rows) > limit:
        raise LimitTooSmall(f"claim {like} has {len(rows)} segments, the limit is {limit}")
    return found[1], [row for row, _, _ in rows]


def get_claim(change: Change, run: RunRecord, claim_id: str) -> ClaimRow:
    """An active claim.

    Raises:
        ClaimGone: unknown, released, or past its lease; says which.
    """
    row: Any = change.execute(
        "SELECT id, claim_id, task, view, segments, lease_s, world, state, expires_at FROM claims "
        "WHERE run = ? AND claim_id = ?",
        (run.id, claim_id),
    ).fetchone()
    if row is None:
        raise ClaimGone(f"run {run.name!r} has no claim {claim_id}", claim_id=claim_id)
    *parts, state, expires_at = row
    if state == ACTIVE and expires_at <= change.now_us:
        state = "expired"
    if state != ACTIVE:
        raise ClaimGone(
            f"claim {claim_id} of run {run.name!r} is {state}: expected one under a lease",
            claim_id=claim_id,
            state=state,
        )
    return ClaimRow(*parts)


def finish(change: Change, run: RunRecord, claim: ClaimRow) -> int:
    """The claim's segments are done for its task: free what nobody else holds. Says how many they were.

    What is released since the run's newest mark is kept instead, for a rewind to it.
    """
    pairs = "segment_tasks.claim = ? AND segment_tasks.state = 'claimed'"
    give_up(change, run.id, pairs, (claim.id,))
    change.execute(
        "UPDATE segment_tasks SET state = 'done' WHERE claim = ? AND state = 'claimed'", (claim.id,)
    )
    count = change.connection.changes()
    rows: Any = change.execute("SELECT segment FROM claim_segments WHERE claim = ?", (claim.id,))
    give_up_other_views(change, [row for (row,) in rows])
    _close(change, claim.id, "done")
    return count


def expire(change: Change, claim: int) -> None:
    """The lease is over: what was not released goes back to the pool."""
    change.execute(
        "UPDATE segment_tasks SET state = 'ready', claim = NULL WHERE claim = ? AND state = 'claimed'",
        (claim,),
    )
    _close(change, claim, "expired")
    change.wakes = True


def keep_table(claim_id: str, ipc: bytes) -> Callable[[Change], None]:
    """The operation that keeps a claim's table, so that every rank sees the same one."""

    def apply(change: Change) -> None:
        change.execute(
            "INSERT OR IGNORE INTO claim_tables "
            "SELECT id, ? FROM claims WHERE claim_id = ? AND state = 'active'",
            (ipc, claim_id),
        )

    return apply


def claim_table(connection: apsw.Connection, run: RunRecord, claim_id: str) -> bytes:
    """A claim's table as an Arrow IPC stream: the one that was kept, or as the rows are now."""
    kept = connection.execute(
        "SELECT ipc FROM claim_tables JOIN claims ON claims.id = claim WHERE claim_id = ?", (claim_id,)
    ).get
    if kept is not None:
        return bytes(kept)
    rows = connection.execute(
        "SELECT segment FROM claim_segments JOIN claims ON claims.id = claim "
        "WHERE claim_id = ? ORDER BY position",
        (claim_id,),
    )
    kinds = read_kinds(connection, "segments", run.id)
    return write_table(segment_table(connection, [row for (row,) in rows], kinds))


def _close(change: Change, claim: int, state: str) -> None:
    change.execute("UPDATE claims SET state = ?, rev = ? WHERE id = ?", (state, change.rev, claim))
    change.execute("DELETE FROM claim_tables WHERE claim = ?", (claim,))
    change.execute(_STATUS, (change.now_us, change.rev, claim))
