"""What was released and is kept for a rewind: pairs of segment and task that are done, and still hold chunks.

While a run has a live mark, releasing gives up no holds: it notes the pair here, under the newest mark. The
pairs of a mark are kept all together or not at all, and never those of a mark before one whose are gone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import apsw

from arrow_tq.store.catalog.chunk_rows import drop_holds
from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.writer import Change

LIVE = "live"
SPENT = "spent"
NOT_KEPT = "this store keeps nothing for marks (keep_marks = 0)"
AGE = "kept for longer than keep_released_s"
FREED_MAX = 1000
"""Pairs of segment and task that are freed in one transaction at most."""
PAIRS = (
    "(segment_tasks.segment, segment_tasks.task) IN "
    "(SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))"
)
"""Condition on ``segment_tasks``: the pairs in a JSON list of [segment, task]."""
_SPENT = "FROM marks JOIN kept ON kept.run = marks.run AND kept.mark = marks.id WHERE marks.status <> 'live'"
_OF_SEGMENTS = "SELECT segment, task FROM kept WHERE segment IN (SELECT value FROM json_each(?))"
ROOM = "its room was needed: the store was past its soft mark"


def give_up(change: Change, run: int, pairs: str, values: Sequence[object]) -> None:
    """Pairs are done: what they hold is kept under the run's newest mark, or freed where there is none.

    Args:
        change: the transaction.
        run: row of their run.
        pairs: SQL condition on ``segment_tasks``.
        values: what its placeholders stand for.
    """
    newest: Any = change.execute(
        "SELECT id, keeps FROM marks WHERE run = ? AND status = 'live' ORDER BY id DESC LIMIT 1", (run,)
    ).fetchone()
    mark, keeps = newest or (None, False)
    if not keeps:
        some = change.execute(f"SELECT 1 FROM segment_tasks WHERE {pairs} LIMIT 1", tuple(values)).get
        if mark is not None and some is not None:
            spend(change, run, mark, NOT_KEPT)
        drop_holds(change, pairs, values)
        return
    change.execute(
        f"INSERT INTO kept SELECT segment, task, ?, ?, ? FROM segment_tasks WHERE {pairs}",
        (run, mark, change.now_us, *values),
    )
    change.execute(
        "UPDATE marks SET kept_segments = kept_segments + ?, updated_at = ?, rev = ? WHERE id = ?",
        (change.connection.changes(), change.now_us, change.rev, mark),
    )


def forget_segments(change: Change, rows: Sequence[int]) -> None:
    """These segments are discarded: no rewind brings them back."""
    found: Any = change.execute(
        "SELECT mark, count(*) FROM kept WHERE segment IN (SELECT value FROM json_each(?)) GROUP BY mark",
        (row_list(rows),),
    ).fetchall()
    if not found:
        return
    _free(change, change.execute(_OF_SEGMENTS, (row_list(rows),)).fetchall())
    for mark, count in found:
        change.execute(
            "UPDATE marks SET kept_segments = kept_segments - ?, updated_at = ?, rev = ? "
            "WHERE id = ? AND status = 'live'",
            (count, change.now_us, change.rev, mark),
        )


def spend(change: Change, run: int, mark: int, reason: str) -> int:
    """Nobody can go back to this mark and those before it. Says how many pairs they kept.

    ``free_spent`` frees these, piece by piece.
    """
    kept = change.execute(
        "SELECT coalesce(sum(kept_segments), 0) FROM marks WHERE run = ? AND id <= ? AND status = 'live'",
        (run, mark),
    ).get
    change.execute(
        "UPDATE marks SET status = 'spent', reason = ?, kept_segments = 0, updated_at = ?, rev = ? "
        "WHERE run = ? AND id <= ? AND status = 'live'",
        (reason, change.now_us, change.rev, run, mark),
    )
    return int(kept)


def free_spent(change: Change) -> int:
    """Free some of what spent marks kept, so that commits behind it do not wait long. Says how many pairs."""
    pairs = change.execute(f"SELECT kept.segment, kept.task {_SPENT} LIMIT ?", (FREED_MAX,)).fetchall()
    _free(change, pairs)
    return len(pairs)


def expire_kept(change: Change, keep_s: float) -> None:
    """Spend the marks under which something was released longer ago than that."""
    late: Any = change.execute(
        "SELECT kept.run, max(kept.mark) FROM kept JOIN marks ON marks.id = kept.mark "
        "WHERE kept_at <= ? AND status = 'live' GROUP BY kept.run",
        (change.now_us - int(keep_s * 1e6),),
    ).fetchall()
    for run, mark in late:
        spend(change, run, mark, AGE)


def spend_for_room(change: Change) -> tuple[str, int] | None:
    """Spend the mark that keeps the oldest pair of all runs.

    Its name, and how many pairs it kept; None where nothing is kept.
    """
    oldest: Any = change.execute(
        "SELECT kept.run, kept.mark, marks.mark FROM kept JOIN marks ON marks.id = kept.mark "
        "WHERE status = 'live' ORDER BY kept_at LIMIT 1"
    ).fetchone()
    if oldest is None:
        return None
    run, mark, name = oldest
    return name, spend(change, run, mark, ROOM)


def something_is_kept(connection: apsw.Connection) -> bool:
    """Whether any mark keeps anything."""
    return connection.execute("SELECT 1 FROM kept LIMIT 1").get is not None


def something_is_spent(connection: apsw.Connection) -> bool:
    """Whether ``free_spent`` has work."""
    return connection.execute(f"SELECT 1 {_SPENT} LIMIT 1").get is not None


def kept_is_due(connection: apsw.Connection, before_us: int) -> bool:
    """Whether something was kept before that time, in microseconds since 1970."""
    return connection.execute("SELECT 1 FROM kept WHERE kept_at <= ? LIMIT 1", (before_us,)).get is not None


def _free(change: Change, pairs: Sequence[object]) -> None:
    """Give up the holds of kept pairs."""
    if not pairs:
        return
    chosen = json.dumps(pairs)
    drop_holds(change, PAIRS, (chosen,))
    change.execute(f"DELETE FROM kept WHERE {PAIRS.replace('segment_tasks.', 'kept.')}", (chosen,))
