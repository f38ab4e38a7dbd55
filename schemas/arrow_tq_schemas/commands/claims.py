"""Commands of claims: taking segments under a lease, and ending it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field as Bound

from arrow_tq_schemas.chunks import Count, Hex128
from arrow_tq_schemas.command_base import Command, Mutation, Seconds, Wire
from arrow_tq_schemas.commands.terms import View


class Claim(Mutation):
    """Take up to ``limit`` segments for a task, whole units at a time, under a lease."""

    verb: ClassVar[str] = "claim"
    run: str
    limit: Annotated[int, Bound(ge=1)]
    where: str | None = None
    task: str | None = None
    unit: Literal["session", "segment", "group"] = "session"
    group_size: Annotated[int, Bound(ge=1)] | None = None
    view: View = "lineage"
    order_by: str | None = None
    max_staleness: Annotated[int, Bound(ge=0)] | None = None
    on_stale: Literal["keep", "discard", "discard_group"] = "keep"
    lease_s: Annotated[float, Bound(gt=0, le=86400 * 30)] = 600.0
    wait_s: Seconds = 0.0
    like: str | None = None
    """Claim id (from a ref) whose segments to take for another task."""
    epoch: Count | None = None
    """The claimer's epoch: one from before a rewind is refused. None: whichever is current."""


class AttachClaim(Mutation):
    """Join a claim as one rank of ``world``."""

    verb: ClassVar[str] = "attach_claim"
    run: str
    claim_id: Hex128
    rank: Annotated[int, Bound(ge=0)]
    world: Annotated[int, Bound(ge=1)]
    epoch: Count | None = None


class ClaimInfo(Wire):
    """Reply to ``Claim`` and ``AttachClaim``; blob 0 is the segments' table as an Arrow IPC stream."""

    claim_id: Hex128
    run: str
    task: str
    view: View
    segments: int
    lease_s: float


class RenewClaim(Mutation):
    """The claimer lives: its lease begins anew."""

    verb: ClassVar[str] = "renew_claim"
    run: str
    claim_id: Hex128


class ReleaseClaim(Mutation):
    """One rank is done with the whole batch. Idempotent. ``rank=None``: the claimer, for all."""

    verb: ClassVar[str] = "release_claim"
    run: str
    claim_id: Hex128
    rank: int | None = None
    world: int | None = None


class GetClaim(Command):
    """A claim and its segments' table (blob 0), without joining it; also one that was released."""

    verb: ClassVar[str] = "get_claim"
    run: str
    claim_id: Hex128
