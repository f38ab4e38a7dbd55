"""Using a claim: ranks join it, renew it, and release it one by one."""

from __future__ import annotations

from typing import Any

from arrow_tq.store.catalog.claims import ClaimRow, expire, finish, get_claim
from arrow_tq.store.catalog.runs import RunRecord, WriterRuns
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.commands import AttachClaim, ClaimInfo, Done, ReleaseClaim, RenewClaim
from arrow_tq_schemas.errors import Conflict, InvalidInput

WORLD_MAX = 1 << 20


def attach(change: Change, runs: WriterRuns, command: AttachClaim) -> ClaimInfo:
    """Join as one rank of ``world``; the first says how many there are.

    Raises:
        ClaimGone: the claim ended.
        Conflict: another world size was given before; names both.
        StaleEpoch: the rank is from before a rewind.
    """
    run = runs.get(change, command.run)
    if command.epoch is not None:
        run.check_epoch(command.epoch)
    claim = get_claim(change, run, command.claim_id)
    _check_world(change, claim, command.rank, command.world)
    return claim.info(run.name)


def renew(change: Change, runs: WriterRuns, command: RenewClaim) -> Done:
    """Begin the lease anew. Raises ``ClaimGone`` where it is over."""
    claim = get_claim(change, runs.get(change, command.run), command.claim_id)
    change.execute(
        "UPDATE claims SET expires_at = ?, rev = ? WHERE id = ?",
        (change.now_us + int(claim.lease_s * 1e6), change.rev, claim.id),
    )
    return Done(count=1)


def release(change: Change, runs: WriterRuns, command: ReleaseClaim) -> Done:
    """One rank, or the claimer for all, is done; counts the segments that this made done.

    Raises:
        ClaimGone: the lease was over before.
        Conflict: ranks have attached, so each must release for itself.
        InvalidInput: a rank outside its world, or the first one without a world.
    """
    run = runs.get(change, command.run)
    if _is_done(change, run, command.claim_id):
        return Done(count=0)
    claim = get_claim(change, run, command.claim_id)
    if command.rank is None:
        if claim.world is not None:
            raise Conflict(
                f"claim {claim.claim_id} is shared by {claim.world} ranks: each releases for itself (rank=)",
                world=claim.world,
            )
        return Done(count=finish(change, run, claim))
    world = command.world if command.world is not None else claim.world
    if world is None:
        raise InvalidInput(f"claim {claim.claim_id}: rank {command.rank} releases, but no world was given")
    _check_world(change, claim, command.rank, world)
    change.execute("INSERT OR IGNORE INTO claim_ranks VALUES (?, ?)", (claim.id, command.rank))
    released = change.execute("SELECT count(*) FROM claim_ranks WHERE claim = ?", (claim.id,)).get
    if released < world:
        change.execute("UPDATE claims SET rev = ? WHERE id = ?", (change.rev, claim.id))
        return Done(count=0)
    return Done(count=finish(change, run, claim))


def expire_claims(change: Change) -> int:
    """Give back the segments of every claim past its lease; says how many claims."""
    late: list[Any] = change.execute(
        "SELECT id FROM claims WHERE state = 'active' AND expires_at <= ?", (change.now_us,)
    ).fetchall()
    for (claim,) in late:
        expire(change, claim)
    return len(late)


def grant_grace(change: Change) -> int:
    """No lease ends sooner than half of it from now: nobody could renew while a server was down. How many."""
    change.execute(
        "UPDATE claims SET expires_at = ?1 + CAST(lease_s * 500000 AS INTEGER), rev = ?2 "
        "WHERE state = 'active' AND expires_at < ?1 + CAST(lease_s * 500000 AS INTEGER)",
        (change.now_us, change.rev),
    )
    return change.connection.changes()


def _check_world(change: Change, claim: ClaimRow, rank: int, world: int) -> None:
    if not 0 <= rank < world <= WORLD_MAX:
        raise InvalidInput(f"rank {rank} of world {world}: expected 0 <= rank < world <= {WORLD_MAX}")
    if claim.world is None:
        change.execute("UPDATE claims SET world = ?, rev = ? WHERE id = ?", (world, change.rev, claim.id))
    elif claim.world != world:
        raise Conflict(
            f"claim {claim.claim_id} is shared by a world of {claim.world} ranks, not {world}",
            world=claim.world,
        )


def _is_done(change: Change, run: RunRecord, claim_id: str) -> bool:
    state = change.execute("SELECT state FROM claims WHERE run = ? AND claim_id = ?", (run.id, claim_id)).get
    return bool(state == "done")
