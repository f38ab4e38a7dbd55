"""Steps: committed whole, once, each after its parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import apsw

from arrow_tq.store.catalog.blobs import attach_blobs, check_blobs, drop_spares, same_blobs
from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq.store.catalog.runs import WriterRuns
from arrow_tq.store.catalog.sessions import SessionRow, get_session
from arrow_tq.store.catalog.step_plans import StepPlan, lost
from arrow_tq.store.catalog.tree import ROOT, check_fence, cut_reason, find_parent, supersede
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.errors import ArrowTQError, Conflict
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import Receipt, joined

_FIND_STEP = (
    "SELECT step_index, version, sampled_start, sampled_end, messages, tools_hash, parent_id, receipts, id "
    "FROM steps WHERE session = ? AND step_id = ?"
)
_INSERT_STEP = (
    "INSERT INTO steps (session, step_index, step_id, parent_id, messages, version, sampled_start,"
    " sampled_end, num_tokens, rewrite_at, cut, tools_hash, retry_of, receipts, created_at, rev)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session, step_id) DO NOTHING"
)
_INSERT_CHUNK = (
    "INSERT INTO chunks (chunk_id, field, groups, start, rows, bytes, session, state, holds, created_at, rev)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, 'committed', 0, ?, ?)"
)
_ADVANCE = "UPDATE sessions SET steps = ?, last_step = ?, updated_at = ?, rev = ? WHERE id = ?"


@dataclass(frozen=True, slots=True)
class CommitStep:
    """The operation that commits a planned step; it gives the step's index.

    One object: a function around the same would be five for the collector, for each step under way.
    """

    plan: StepPlan
    runs: WriterRuns
    pins: ChunkPins

    def __call__(self, change: Change) -> int:
        commit = self.plan.commit
        run = self.runs.get(change, commit.run)
        run.check_epoch(commit.epoch)
        session = get_session(change.connection, run, commit.session_id)
        try:
            session.check_open()
            if self.plan.problem is not None:
                raise self.plan.problem
            check_fence(change.connection, session, commit.step_id)
            parent = find_parent(change.connection, session, commit.step_id, commit.parent, commit.retry_of)
            _pin(change, self.plan, self.pins)
            brought = check_blobs(
                *(change, run.id, commit.step_id, self.plan.blobs, self.pins),
                lambda connection, ids: _unpin(connection, ids, self.pins),
            )
        except ArrowTQError:
            # A retry is answered although its session is over, or its chunks were released.
            known = change.execute(_FIND_STEP, (session.id, commit.step_id)).fetchone()
            if known is None:
                raise
            change.take_back()
            return _retried(change, self.plan, known)
        start, end = commit.sampled or (None, None)
        rewrite_at, cut = _cut(change.connection, session.id, parent, self.plan)
        change.execute(
            _INSERT_STEP,
            (
                *(session.id, session.steps, commit.step_id, parent, commit.messages, commit.version),
                *(start, end, self.plan.num_tokens, rewrite_at, cut, commit.tools, commit.retry_of),
                *(self.plan.receipts, change.now_us, change.rev),
            ),
        )
        if not change.connection.changes():
            change.take_back()
            known = change.execute(_FIND_STEP, (session.id, commit.step_id)).fetchone()
            assert known is not None
            return _retried(change, self.plan, known)
        step = change.connection.last_insert_rowid()
        _attach(change, session, self.plan)
        if self.plan.blobs:
            attach_blobs(change, run.id, session.id, step, self.plan.blobs, brought)
        if commit.retry_of is not None:
            supersede(change, session, commit.retry_of, commit.step_id)
        if commit.version is not None:
            self.runs.order_version(change, run, commit.version)
        change.execute(_ADVANCE, (session.steps + 1, commit.step_id, change.now_us, change.rev, session.id))
        return session.steps


def find_receipts(connection: apsw.Connection, session: int, step_id: str, run: str) -> list[Receipt]:
    """Receipts of a committed step; their epoch is not kept."""
    blob: bytes | None = connection.execute(
        "SELECT receipts FROM steps WHERE session = ? AND step_id = ?", (session, step_id)
    ).get
    return [] if blob is None else decode_receipts(blob, run, 0)


def _retried(change: Change, plan: StepPlan, known: Sequence[object]) -> int:
    """The index of a step that is committed already, if this is the same one.

    A writer that was cut off may have stored its rows again, as other chunks: then the record and the
    shape of the receipts decide, and the new chunks stay unattached.
    """
    index, version, start, end, messages, tools, parent, blob, row = known
    commit = plan.commit
    assert isinstance(index, int)
    assert isinstance(blob, bytes)
    assert isinstance(row, int)
    if not same_blobs(change.connection, row, commit.blobs):
        raise Conflict(
            f"step {commit.step_id!r} of session {commit.session_id!r} is committed with other blobs",
            step_id=commit.step_id,
        )
    drop_spares(change, plan.blobs)
    if blob == plan.receipts:
        return index
    record = (version, None if start is None else (start, end), messages, tools)
    sampled = None if commit.sampled is None else tuple(commit.sampled)
    again = (commit.version, sampled, commit.messages, commit.tools)
    if record != again or commit.parent not in (None, parent or ROOT):
        raise Conflict(
            f"step {commit.step_id!r} of session {commit.session_id!r} is committed with another version, "
            "sampled range, parent, tools or messages",
            step_id=commit.step_id,
        )
    stored = decode_receipts(blob, commit.run, commit.epoch)
    if _shape(stored) != _shape(commit.receipts):
        raise Conflict(
            f"step {commit.step_id!r} of session {commit.session_id!r} is committed with other rows: "
            f"{_spell(stored)}; now {_spell(commit.receipts)}",
            step_id=commit.step_id,
        )
    return index


def _cut(
    connection: apsw.Connection, session: int, parent: str | None, plan: StepPlan
) -> tuple[int | None, str | None]:
    """Where a step departs from its path's tokens, and why its parent's segment ends before it."""
    if parent is None:
        return None, None
    cut = cut_reason(connection, session, parent, plan.commit)
    if cut is None and plan.rewrite_at is not None:
        cut = "mismatch" if plan.commit.extends else "rewrite"
    return plan.rewrite_at, cut


def _pin(change: Change, plan: StepPlan, pins: ChunkPins) -> None:
    if not plan.ids:
        return
    missing = pins.pin(plan.ids)
    if missing:
        raise lost(f"step {plan.commit.step_id!r}", missing)
    change.undo.append(lambda connection: _unpin(connection, plan.ids, pins))


def _attach(change: Change, session: SessionRow, plan: StepPlan) -> None:
    if not plan.chunks:
        return
    before = change.connection.total_changes()
    try:
        change.executemany(
            _INSERT_CHUNK, [(*row, session.id, change.now_us, change.rev) for row in plan.chunks]
        )
    except apsw.ConstraintError:
        refused = plan.chunks[change.connection.total_changes() - before][0]
        owner = change.execute(
            "SELECT session_id FROM chunks JOIN sessions ON sessions.id = chunks.session WHERE chunk_id = ?",
            (refused,),
        ).get
        raise Conflict(
            f"step {plan.commit.step_id!r}: chunk {refused.hex()} is attached already, to a step of session "
            f"{owner!r}",
            chunk_id=refused.hex(),
        ) from None


def _unpin(connection: apsw.Connection, ids: Sequence[ChunkId], pins: ChunkPins) -> None:
    """Take the marks back, but for chunks that belong to a step after all."""
    families = {one.sibling(0) for one in ids}
    free = {one for one in families if not _is_committed(connection, one)}
    pins.unpin([one for one in ids if one.sibling(0) in free])


def _is_committed(connection: apsw.Connection, chunk_id: ChunkId) -> bool:
    found = connection.execute("SELECT 1 FROM chunks WHERE chunk_id = ?", (chunk_id.to_bytes(),)).get
    return found is not None


def _shape(receipts: Sequence[Receipt]) -> list[tuple[object, ...]]:
    """What two writes of the same rows have in common: fields, places, which rows are null."""
    return [(one.field, one.start, one.rows, _valid(one)) for one in joined(receipts)]


def _valid(receipt: Receipt) -> list[tuple[int, int]]:
    """Positions of rows that are not null, in runs that do not touch, however they were cut into chunks."""
    runs: list[tuple[int, int]] = []
    for span in receipt.spans():
        begin = runs.pop()[0] if runs and runs[-1][1] == span.start else span.start
        runs.append((begin, span.end))
    return runs


def _spell(receipts: Sequence[Receipt]) -> str:
    return ", ".join(f"{one.field} [{one.start}, {one.end})" for one in receipts) or "none"
