"""Counting what waits and what was thrown away."""

from __future__ import annotations

import time
from typing import Any

import apsw

from arrow_tq.store.catalog.config import CatalogGauges
from arrow_tq.store.catalog.task_sets import NOBODY


def read_gauges(connection: apsw.Connection, waiters: int, commits: int) -> CatalogGauges:
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
    return CatalogGauges(open_sessions, unclaimed, age_s, waiters, reasons, commits)
