"""Ids that people give: of segments, or of sessions, which stand for all their segments in a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import apsw

from arrow_tq.store.catalog.runs import RunRecord
from arrow_tq.store.catalog.sessions import FINALIZED, SessionRow, find_session
from arrow_tq_schemas.errors import InvalidInput, NotFound

NAMES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Named:
    """What ids stand for: rows of segments in order, and sessions that have none in the view."""

    segments: list[int]
    sessions: list[SessionRow]


def resolve_names(connection: apsw.Connection, run: RunRecord, ids: Sequence[str], view: str) -> Named:
    """Look ids up, segments first.

    Raises:
        NotFound: an id that is neither a segment nor a session of the run; names it.
    """
    if len(ids) > NAMES_MAX:
        raise InvalidInput(f"{len(ids)} ids: at most {NAMES_MAX}")
    segments: list[int] = []
    sessions: list[SessionRow] = []
    for name in ids:
        found = connection.execute(
            "SELECT id FROM segments WHERE run = ? AND segment_id = ?", (run.id, name)
        ).get
        if found is not None:
            segments.append(found)
            continue
        session = find_session(connection, run, name)
        if session is None:
            raise NotFound(f"run {run.name!r} has no segment or session {name!r}", id=name)
        rows = [
            row
            for (row,) in connection.execute(
                "SELECT id FROM segments WHERE session = ? AND view = ? ORDER BY segment_index",
                (session.id, view),
            )
        ]
        segments += rows
        if not rows:
            sessions.append(session)
    return Named(segments, sessions)


def resolve_segments(connection: apsw.Connection, run: RunRecord, ids: Sequence[str], view: str) -> list[int]:
    """Rows of segments in the order of their ids.

    Raises:
        NotFound: also for a session that was not finalized in the view, naming its status.
    """
    named = resolve_names(connection, run, ids, view)
    for session in named.sessions:
        done = connection.execute(
            "SELECT 1 FROM finalized WHERE session = ? AND view = ?", (session.id, view)
        ).get
        if done is None:
            elsewhere = " in another view" if session.status == FINALIZED else ""
            raise NotFound(
                f"session {session.session_id!r} is {session.status}{elsewhere}: it has no segments in view "
                f"{view!r}",
                id=session.session_id,
            )
    return named.segments
