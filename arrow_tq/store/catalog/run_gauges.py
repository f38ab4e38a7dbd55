"""Counting what some runs have open and unclaimed: for those who may not see the others."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import apsw

from arrow_tq.store.catalog.task_sets import NOBODY

_RUNS = "(SELECT id FROM runs WHERE run IN (SELECT value FROM json_each(?)))"


@dataclass(frozen=True, slots=True)
class RunGauges:
    """The part of ``CatalogGauges`` that belongs to runs."""

    open_sessions: int
    unclaimed_segments: int
    oldest_unclaimed_s: float


def read_run_gauges(connection: apsw.Connection, runs: Collection[str]) -> RunGauges:
    """Counts of these runs; names of none are passed over."""
    names = json.dumps(sorted(runs))
    open_sessions = connection.execute(
        f"SELECT count(*) FROM sessions WHERE status = 'open' AND run IN {_RUNS}", (names,)
    ).get
    ready: Any = connection.execute(
        "SELECT count(DISTINCT segment), min(segment) FROM segment_tasks "
        f"WHERE state = 'ready' AND task <> ? AND run IN {_RUNS}",
        (NOBODY, names),
    ).fetchone()
    unclaimed, oldest = ready
    created_us = connection.execute("SELECT created_at FROM segments WHERE id = ?", (oldest,)).get
    age_s = 0.0 if created_us is None else max(0.0, time.time() - created_us / 1e6)
    return RunGauges(int(open_sessions), int(unclaimed), age_s)
