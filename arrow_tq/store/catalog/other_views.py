"""The view that a task does not train from: it must not keep a session's chunks for ever.

A task that has trained in one view of a session, and is done with all of it there, is done with the views
of the session that it never claimed. What it has claimed in another view it holds until that is released.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.kept import PAIRS, give_up
from arrow_tq.store.catalog.writer import Change

REASON = "trained in another view"
_SESSIONS = """
    SELECT session FROM finalized WHERE session IN (
        SELECT session FROM segments WHERE id IN (SELECT value FROM json_each(?)))
    GROUP BY session HAVING count(*) > 1"""
_UNCLAIMED = """
    SELECT other.id, pair.task FROM segments AS other
    JOIN segment_tasks AS pair ON pair.segment = other.id
    WHERE other.session IN (SELECT value FROM json_each(?)) AND pair.state = 'ready'
    AND NOT EXISTS (
        SELECT 1 FROM segments AS same
        JOIN segment_tasks AS taken ON taken.segment = same.id AND taken.task = pair.task
        WHERE same.session = other.session AND same.view = other.view AND taken.state IN ('claimed', 'done'))
    AND EXISTS (
        SELECT 1 FROM segments AS trained
        JOIN segment_tasks AS over ON over.segment = trained.id AND over.task = pair.task
        WHERE trained.session = other.session AND trained.view <> other.view AND over.state = 'done'
        AND NOT EXISTS (
            SELECT 1 FROM segments AS rest
            JOIN segment_tasks AS owed ON owed.segment = rest.id AND owed.task = pair.task
            WHERE rest.session = trained.session AND rest.view = trained.view
            AND owed.state IN ('ready', 'claimed')))"""


def give_up_other_views(change: Change, segments: Sequence[int]) -> None:
    """To be called when these segments were released or discarded."""
    sessions: Any = change.execute(_SESSIONS, (row_list(segments),)).fetchall()
    if not sessions:
        return
    pairs: Any = change.execute(_UNCLAIMED, (row_list([row for (row,) in sessions]),)).fetchall()
    if not pairs:
        return
    chosen = json.dumps(pairs)
    run = change.execute("SELECT run FROM segments WHERE id = ?", (pairs[0][0],)).get
    give_up(change, run, PAIRS, (chosen,))
    change.execute(f"UPDATE segment_tasks SET state = 'done' WHERE {PAIRS}", (chosen,))
    change.execute(
        "UPDATE segments SET status = 'done', reason = ?, updated_at = ?, rev = ? "
        "WHERE id IN (SELECT value FROM json_each(?)) AND status = 'ready' AND NOT EXISTS "
        "(SELECT 1 FROM segment_tasks WHERE segment = segments.id AND state <> 'done')",
        (REASON, change.now_us, change.rev, row_list([row for row, _ in pairs])),
    )
