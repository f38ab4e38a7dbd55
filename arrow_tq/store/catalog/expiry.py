"""What time alone changes: leases, sessions past their time to live, old replies."""

from __future__ import annotations

import time
from typing import Any

import apsw

from arrow_tq.store.catalog.discards import discard_segments, end_session
from arrow_tq.store.catalog.kept import expire_kept, kept_is_due
from arrow_tq.store.catalog.leases import expire_claims
from arrow_tq.store.catalog.requests import prune
from arrow_tq.store.catalog.sessions import OPEN, SESSION_COLUMNS, SessionRow
from arrow_tq.store.catalog.writer import Change

EXPIRED = "expired"
SESSIONS_MAX = 1000
"""Sessions expired in one transaction at most."""


def leases_are_due(connection: apsw.Connection) -> bool:
    """Whether a claim's lease has run out."""
    return _any(connection, "SELECT 1 FROM claims WHERE state = 'active' AND expires_at <= ?", _now_us())


def something_is_due(connection: apsw.Connection, request_ttl_s: float, keep_released_s: float) -> bool:
    """Whether ``expire_all`` would change anything: a quiet store makes no transactions."""
    now_us = _now_us()
    before = now_us - int(request_ttl_s * 1e6)
    return (
        leases_are_due(connection)
        or _any(connection, "SELECT 1 FROM sessions WHERE expires_at IS NOT NULL AND expires_at <= ?", now_us)
        or _any(connection, "SELECT 1 FROM requests WHERE created_at < ?", before)
        or kept_is_due(connection, now_us - int(keep_released_s * 1e6))
    )


def expire_all(change: Change, request_ttl_s: float, keep_released_s: float) -> None:
    """End what time has ended: claims, what marks keep, sessions, stored replies."""
    expire_claims(change)
    expire_kept(change, keep_released_s)
    expire_sessions(change)
    prune(change, request_ttl_s)


def expire_sessions(change: Change) -> int:
    """End open sessions past their time to live, and free finished ones that no task reads."""
    late: list[Any] = change.execute(
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE expires_at IS NOT NULL AND expires_at <= ? LIMIT ?",
        (change.now_us, SESSIONS_MAX),
    ).fetchall()
    for row in late:
        session = SessionRow(*row)
        if session.status != OPEN:
            segments: list[Any] = change.execute(
                "SELECT id FROM segments WHERE session = ?", (session.id,)
            ).fetchall()
            discard_segments(change, [segment for (segment,) in segments], EXPIRED)
            change.execute(
                "UPDATE sessions SET status = ?, reason = ?, updated_at = ?, expires_at = NULL, rev = ? "
                "WHERE id = ?",
                (EXPIRED, "ttl", change.now_us, change.rev, session.id),
            )
        else:
            end_session(change, session, EXPIRED, "ttl")
    return len(late)


def _any(connection: apsw.Connection, query: str, bound: int) -> bool:
    return connection.execute(query + " LIMIT 1", (bound,)).get is not None


def _now_us() -> int:
    return time.time_ns() // 1000
