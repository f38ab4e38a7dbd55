"""Turning claims into batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arrow_tq.calls import read_table
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.commands import AttachClaim, Claim, ClaimInfo
from arrow_tq_schemas.errors import InternalError

if TYPE_CHECKING:
    from arrow_tq.runs import Run


def take_batch(run: Run, command: Claim | AttachClaim) -> Batch:
    """The batch that a claim, or joining one as a rank, gives; the run remembers it."""
    reply = run.backend.execute(command)
    if not isinstance(reply.body, ClaimInfo):
        raise InternalError(f"reply to a claim: {type(reply.body).__name__}")
    rank, world = (command.rank, command.world) if isinstance(command, AttachClaim) else (None, None)
    batch = Batch(run, reply.body, read_table(reply.blobs[0]), rank, world)
    run.batches.add(batch)
    return batch
