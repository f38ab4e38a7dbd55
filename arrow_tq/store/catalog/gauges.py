"""Counting what waits and what was thrown away."""

from __future__ import annotations

import time
from typing import Any

import apsw

from arrow_tq.store.catalog.config import CatalogGauges
from arrow_tq.store.catalog.task_sets import NOBODY


def read_gauges(connection: apsw.Connection, waiters: int, commits: int) -> CatalogGauges:
    """Counts of the store; ``waiters`` and ``commits`` are what the process itself counts."""
    open_sessions = int(connection.execute("SELECT count(*) FROM sessions WHERE status = 'open'").get)
    ready: Any = connection.execute(
        "SELECT count(DISTINCT segment), min(segment) FROM segment_tasks WHERE state = 'ready' AND task <> ?",
        (NOBODY,),
    ).fetchone()
    unclaimed, oldest = ready
    created_us = connection.execute("SELECT created_at FROM segments WHERE id = ?", (oldest,)).get
    age_s = 0.0 if created_us is None else max(0.0, time.time() - created_us / 1e6)
    discarded: Any = connection.execute("SELECT reason, count FROM discards ORDER BY reason")
    reasons: dict[str, int] = dict(discarded)
    active: Any = connection.execute(
        "SELECT count(*), coalesce(sum(segments), 0), min(expires_at) FROM claims "
        "WHERE state = 'active' AND segments > 0"
    ).fetchone()
    claims, claimed, first_us = active
    ended: Any = connection.execute(
        "SELECT state, count(*) FROM claims WHERE state <> 'active' AND segments > 0 GROUP BY state"
    )
    marks: Any = connection.execute(
        "SELECT count(*), coalesce(sum(kept_segments), 0) FROM marks WHERE status = 'live'"
    ).fetchone()
    return CatalogGauges(
        open_sessions=open_sessions,
        unclaimed_segments=unclaimed,
        oldest_unclaimed_s=age_s,
        waiters=waiters,
        discarded_by_reason=reasons,
        commits=commits,
        claims_active=claims,
        claimed_segments=claimed,
        lease_ends_s=0.0 if first_us is None else max(0.0, first_us / 1e6 - time.time()),
        claims_by_end=dict(ended),
        marks_live=marks[0],
        kept_segments=marks[1],
    )
