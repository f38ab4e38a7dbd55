"""Commands of the store as a whole, and the replies that many commands share."""

from __future__ import annotations

from typing import ClassVar

from arrow_tq_schemas.command_base import Command, Wire


class GetPressure(Command):
    verb: ClassVar[str] = "pressure"


class Pressure(Wire):
    """How full the store is; producers hold back by it."""

    capacity_bytes: int
    used_bytes: int
    fill: float
    """used / capacity, 0 to 1."""
    soft_mark: float
    """Above this fill only work that is already open gets room."""
    oldest_unclaimed_s: float
    """Age of the oldest finalized segment that some task has not claimed; 0 where there is none."""
    open_sessions: int
    unclaimed_segments: int
    waiters: int
    """Callers that wait for room or for segments."""


class GetStats(Command):
    verb: ClassVar[str] = "stats"


class Stats(Wire):
    """Counters and gauges by name, as ``/metrics`` shows them; ``{label}`` parts are in the name."""

    values: dict[str, float]


class RunQuery(Command):
    """SQL over the metadata; the reply's blob 0 is an Arrow IPC stream. ``run=None``: every run."""

    verb: ClassVar[str] = "sql"
    query: str
    run: str | None = None


class Done(Wire):
    """Reply of commands that only change something: how many rows they touched."""

    count: int = 0


class Empty(Wire):
    """Reply whose content is its blobs."""
