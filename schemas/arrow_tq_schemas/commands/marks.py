"""Commands of checkpoints: marking one, and rewinding to it."""

from __future__ import annotations

from typing import ClassVar

from arrow_tq_schemas.chunks import Count
from arrow_tq_schemas.command_base import Mutation, Wire
from arrow_tq_schemas.commands.terms import Names


class Mark(Mutation):
    """The trainer saved a checkpoint: what is released from here on is kept for a rewind to it.

    Idempotent by name. What earlier marks kept is freed.
    """

    verb: ClassVar[str] = "mark"
    run: str
    epoch: Count
    name: str


class MarkInfo(Wire):
    """A mark of a run.

    ``status`` is live, spent or rewound, as in the table ``marks``; ``freed`` counts the pairs of segment and
    task that earlier marks had kept and this one freed.
    """

    run: str
    name: str
    epoch: Count
    policy_version: str | None = None
    status: str = "live"
    freed: int = 0


class Rewind(Mutation):
    """The trainer restored a checkpoint: all that was claimed or released since its mark is open again.

    The run's epoch advances, so that writers and claimers from before are refused.
    """

    verb: ClassVar[str] = "rewind"
    run: str
    epoch: Count
    name: str


class LostSession(Wire):
    """A session to generate again, under another id; ``reason`` says how it ended."""

    session_id: str
    group: str | None
    reason: str


class Rewound(Wire):
    """What a rewind did."""

    run: str
    name: str
    epoch: Count
    """The new epoch; whoever goes on joins it."""
    policy_version: str | None
    """As it was at the mark; it is the run's policy version again."""
    segments: Names
    """Claimable again, in the order of finalizing: those released since, and those under a claim."""
    sessions: list[LostSession]
    """In flight when the run was rewound (reason ``rewound``), or ended untrained since the mark."""
