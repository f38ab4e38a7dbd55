"""Choosing what a claim takes: whole units, in order, while they fit. Reads only.

A unit is a session, a segment or a group. It is available when each of its segments that the task still
has to train is ready and matches: a unit is never split by a predicate, by staleness, or by another
claim. Discarded segments do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import apsw

from arrow_tq.store.catalog.columns import read_kinds
from arrow_tq.store.catalog.runs import RunRecord
from arrow_tq.store.catalog.segment_rows import where_columns
from arrow_tq.store.catalog.segments import Clause, where_sql
from arrow_tq.store.catalog.versions import current_ordinal
from arrow_tq.store.where import compile_order_by
from arrow_tq_schemas.commands import Claim, View
from arrow_tq_schemas.errors import InvalidInput, LimitTooSmall

_READY = (
    "FROM segment_tasks JOIN segments ON segments.id = segment_tasks.segment WHERE segment_tasks.run = ? "
    "AND segment_tasks.task = ? AND segment_tasks.view = ? AND segment_tasks.state = 'ready' AND "
)
_OWED = (
    "SELECT count(*) FROM segments JOIN segment_tasks ON segment_tasks.segment = segments.id "
    "WHERE segment_tasks.task = ? AND segment_tasks.view = ? AND segment_tasks.state IN ('ready', 'claimed') "
    "AND "
)


@dataclass(frozen=True, slots=True)
class Wish:
    """A claim's choice, compiled."""

    run: RunRecord
    task: str
    view: View
    unit: str
    limit: int
    group_size: int | None
    clause: Clause
    order_by: str | None
    max_staleness: int | None

    @property
    def scope(self) -> tuple[object, ...]:
        return (self.run.id, self.task, self.view)


def make_wish(connection: apsw.Connection, run: RunRecord, command: Claim) -> Wish:
    """Raises ``InvalidQuery`` for ``where`` and ``order_by``, ``StaleEpoch`` for a claimer from before a
    rewind, ``InvalidInput`` for the rest.
    """
    if command.epoch is not None:
        run.check_epoch(command.epoch)
    kinds = read_kinds(connection, "segments", run.id)
    if command.group_size is not None and command.unit == "segment":
        raise InvalidInput("group_size asks for whole groups, unit='segment' for parts of them: give one")
    return Wish(
        run,
        claim_task(run, command.task),
        command.view,
        "group" if command.group_size is not None else command.unit,
        command.limit,
        command.group_size,
        where_sql(command.where, kinds),
        None if command.order_by is None else compile_order_by(command.order_by, where_columns(kinds)),
        command.max_staleness,
    )


def claim_task(run: RunRecord, task: str | None) -> str:
    """The task that a claim is for: the run's only one where it is left out."""
    if task is None and len(run.tasks) == 1:
        return next(iter(run.tasks))
    if task is None or task not in run.tasks:
        said = "names no task" if task is None else f"names task {task!r}"
        raise InvalidInput(f"the claim {said}; run {run.name!r} declares {', '.join(run.tasks)}")
    return task


def choose(connection: apsw.Connection, wish: Wish) -> list[int]:
    """Rows of the segments to take, in claim order; empty where nothing is available.

    Raises:
        LimitTooSmall: the first available unit alone has more segments than the limit.
    """
    stale, ordinal = _stale(connection, wish)
    sql, values = wish.clause
    # In finalize order the index of ready segments gives the rows as they are needed: nothing is sorted.
    order = "segment_tasks.segment" if wish.order_by is None else f"{wish.order_by}, segments.id"
    ready: Any = connection.execute(
        f"SELECT segments.id, segments.session, segments.group_id, segments.segment_index {_READY} {sql} "
        f"AND NOT {stale} ORDER BY {order}",
        (*wish.scope, *values, *ordinal),
    )
    with closing(ready):
        if wish.unit == "segment":
            return [row[0] for row in islice(ready, wish.limit)]
        return _take_units(connection, wish, ready)


def _take_units(connection: apsw.Connection, wish: Wish, ready: Any) -> list[int]:
    taken: list[int] = []
    streams = wish.unit == "group" and wish.order_by is None
    for unit, rows in _groups(connection, ready, wish) if streams else _units(ready, wish):
        if not _is_whole(connection, wish, unit, len(rows)):
            continue
        if len(taken) + len(rows) > wish.limit:
            if not taken:
                raise _too_small(connection, wish, rows)
            break
        taken += rows
    return taken


def find_stale(connection: apsw.Connection, wish: Wish, whole_groups: bool) -> list[int]:
    """Ready segments staler than ``max_staleness``; with them the rest of their groups, if asked.

    What another task has claimed is left alone.
    """
    stale, ordinal = _stale(connection, wish)
    sql, values = wish.clause
    found: list[Any] = connection.execute(
        f"SELECT segments.id, segments.session, segments.group_id {_READY} {sql} AND {stale} "
        "AND segments.status = 'ready'",
        (*wish.scope, *values, *ordinal),
    ).fetchall()
    rows: set[Any] = {row for row, _, _ in found}
    if whole_groups:
        for session, group in {(None if group else session, group) for _, session, group in found}:
            rows.update(
                row
                for (row,) in connection.execute(
                    "SELECT id FROM segments WHERE run = ? AND view = ? AND status = 'ready' AND "
                    + ("session = ?" if group is None else "group_id = ?"),
                    (wish.run.id, wish.view, session if group is None else group),
                )
            )
    return sorted(rows)


def _stale(connection: apsw.Connection, wish: Wish) -> tuple[str, tuple[int, ...]]:
    """SQL that is true for segments that are too stale. One without versions never is."""
    if wish.max_staleness is None:
        return "0", ()
    oldest = current_ordinal(connection, wish.run.id) - wish.max_staleness
    return "coalesce(segments.oldest_version < ?, 0)", (max(oldest, -1),)


def _groups(
    connection: apsw.Connection, ready: Iterable[tuple[int, int, str | None, int]], wish: Wish
) -> Iterable[tuple[object, list[int]]]:
    """Groups with their ready segments in finalize order. Each is looked up when it is reached: a claim reads
    as many segments as it passes, not all that are ready.
    """
    stale, ordinal = _stale(connection, wish)
    sql, values = wish.clause
    query = (
        "SELECT segments.id, segments.session, segments.segment_index FROM segments "
        "JOIN segment_tasks ON segment_tasks.segment = segments.id "
        "WHERE segments.run = ? AND segments.group_id = ? AND segment_tasks.task = ? "
        f"AND segment_tasks.view = ? AND segment_tasks.state = 'ready' AND {sql} AND NOT {stale} "
        "ORDER BY segments.id"
    )
    reached: set[str] = set()
    for _, _, group, _ in ready:
        if group is None or group in reached:
            continue
        reached.add(group)
        found = connection.execute(query, (wish.run.id, group, wish.task, wish.view, *values, *ordinal))
        yield group, _sorted([(session, index, row) for row, session, index in found])


def _units(
    ready: Iterable[tuple[int, int, str | None, int]], wish: Wish
) -> Iterable[tuple[object, list[int]]]:
    """Units with their ready segments, ordered by the first of them that was reached."""
    grouped = wish.unit == "group"
    found: dict[object, list[tuple[int, int, int]]] = {}
    last: object = None
    for row, session, group, index in ready:
        unit: object = group if grouped else session
        if unit is None:
            continue
        # In finalize order a session's segments are neighbours, so that it is complete once left.
        if not grouped and wish.order_by is None and unit != last and last is not None:
            yield last, _sorted(found.pop(last))
        last = unit
        found.setdefault(unit, []).append((session, index, row))
    for unit, segments in found.items():
        yield unit, _sorted(segments)


def _sorted(segments: list[tuple[int, int, int]]) -> list[int]:
    """A unit's segments session by session, each in its order."""
    return [row for _, _, row in sorted(segments)]


def _is_whole(connection: apsw.Connection, wish: Wish, unit: object, ready: int) -> bool:
    if wish.unit == "session":
        owed = connection.execute(_OWED + "segments.session = ?", (wish.task, wish.view, unit)).get
        return bool(owed == ready)
    owed = connection.execute(
        _OWED + "segments.run = ? AND segments.group_id = ?", (wish.task, wish.view, wish.run.id, unit)
    ).get
    return bool(owed == ready) and _group_is_whole(connection, wish, unit)


def _group_is_whole(connection: apsw.Connection, wish: Wish, group: object) -> bool:
    """No session of it is open, each has this view, and ``group_size`` have ended or no more will come.

    What is finalized in another view alone may still get this one, until the group is closed.
    """
    counts: Any = connection.execute(
        "SELECT count(*), count(*) FILTER (WHERE status = 'open'), count(*) FILTER ("
        "WHERE status = 'finalized' AND NOT EXISTS ("
        "SELECT 1 FROM finalized WHERE session = sessions.id AND view = ?)) "
        "FROM sessions WHERE run = ? AND group_id = ?",
        (wish.view, wish.run.id, group),
    ).fetchone()
    total, still_open, elsewhere = counts
    if still_open:
        return False
    if not elsewhere and (wish.group_size is None or total >= wish.group_size):
        return True
    closed = connection.execute(
        "SELECT 1 FROM closed_groups WHERE run = ? AND group_id = ?", (wish.run.id, group)
    ).get
    return closed is not None


def _too_small(connection: apsw.Connection, wish: Wish, rows: list[int]) -> LimitTooSmall:
    names: Any = connection.execute(
        "SELECT session_id, group_id FROM segments WHERE id = ?", (rows[0],)
    ).fetchone()
    session, group = names
    name = group if wish.unit == "group" else session
    return LimitTooSmall(
        f"{wish.unit} {name!r} has {len(rows)} segments, the limit is {wish.limit}: it is never split",
        unit=name,
        segments=len(rows),
        limit=wish.limit,
    )
