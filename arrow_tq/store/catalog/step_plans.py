"""What can be checked of a step before the writer sees it: receipts against their field and chunks.

Done in the caller's thread. What is found wrong waits in the plan: a retry of a step that is committed
already must be answered even if its chunks were released since.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from arrow_tq.store.catalog.blob_plans import PlannedBlob, plan_blobs
from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq.store.catalog.receipt_blobs import encode_receipts
from arrow_tq.store.catalog.runs import RunRecord
from arrow_tq_schemas.commands import StepCommit
from arrow_tq_schemas.errors import (
    ArrowTQError,
    ChunkLost,
    Conflict,
    InvalidInput,
    RowCountMismatch,
    StaleEpoch,
)
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.names import check_id
from arrow_tq_schemas.receipts import Receipt, StoredChunk

POSITION_MAX = 1 << 48
MESSAGES_BYTES_MAX = 32 << 20
IDS_NAMED_MAX = 8
ChunkRow = tuple[bytes, str, int, int, int, int]
"""Chunk id, field, layer groups, start, rows, bytes."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step ready for the writer."""

    commit: StepCommit
    receipts: bytes
    chunks: Sequence[ChunkRow]
    ids: Sequence[ChunkId]
    """All layer groups."""
    num_tokens: int | None
    rewrite_at: int | None
    problem: ArrowTQError | None
    blobs: Sequence[PlannedBlob]


def plan_step(
    run: RunRecord, commit: StepCommit, rewrite_at: int | None, pins: ChunkPins, blob_bytes_max: int
) -> StepPlan:
    """Raises ``InvalidInput`` where the step cannot even be looked up; the rest waits in ``problem``."""
    check_id(commit.step_id, "step id")
    named = (commit.parent or None, "parent step id"), (commit.retry_of, "retried step id")
    for text, what in (*named, (commit.version, "version"), (commit.tools, "tools")):
        if text is not None:
            check_id(text, what)
    if commit.retry_of == commit.step_id:
        raise InvalidInput(f"step {commit.step_id!r} retries itself: a retry has an id of its own")
    problem: ArrowTQError | None = None
    chunks: Sequence[ChunkRow] = ()
    ids: Sequence[ChunkId] = ()
    blobs: Sequence[PlannedBlob] = ()
    num_tokens = None
    try:
        _check_record(commit)
        num_tokens = _check_ends(run, commit)
        if commit.receipts:
            chunks, ids = _check_receipts(run, commit, pins)
        if commit.blobs:
            blobs = plan_blobs(commit, blob_bytes_max, pins)
    except ArrowTQError as error:
        problem = error
    receipts = encode_receipts(commit.receipts)
    return StepPlan(commit, receipts, chunks, ids, num_tokens, rewrite_at, problem, blobs)


def _check_receipts(
    run: RunRecord, commit: StepCommit, pins: ChunkPins
) -> tuple[list[ChunkRow], list[ChunkId]]:
    chunks: list[ChunkRow] = []
    ids: list[ChunkId] = []
    what = f"step {commit.step_id!r}"
    for receipt in commit.receipts:
        check_receipt(run, commit.epoch, what, receipt, pins, chunks, ids)
    return chunks, ids


def lost(what: str, ids: Sequence[ChunkId]) -> ChunkLost:
    """The error for chunks that the shard does not have; ``what`` needs them."""
    names = [chunk_id.hex for chunk_id in ids[:IDS_NAMED_MAX]]
    more = f" and {len(ids) - len(names)} more" if len(ids) > len(names) else ""
    return ChunkLost(f"{what}: no chunk {', '.join(names)}{more}", ids=names)


def _check_record(commit: StepCommit) -> None:
    if commit.sampled is not None:
        start, end = commit.sampled
        if not 0 <= start <= end < POSITION_MAX:
            raise InvalidInput(
                f"step {commit.step_id!r}: sampled ({start}, {end}), expected 0 <= start <= end"
            )
    if len(commit.messages) > MESSAGES_BYTES_MAX or not commit.messages.isascii():
        raise InvalidInput(
            f"step {commit.step_id!r}: messages: expected ASCII JSON of {MESSAGES_BYTES_MAX} bytes at most"
        )
    try:
        whole = commit.messages == "[]" or isinstance(json.loads(commit.messages), list)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"step {commit.step_id!r}: messages: not JSON ({error})") from None
    if not whole:
        raise InvalidInput(f"step {commit.step_id!r}: messages: expected a JSON array")


def _check_ends(run: RunRecord, commit: StepCommit) -> int | None:
    """End of the step's ``all`` fields, of its sampled ones where it has none of those."""
    ends: dict[str, dict[str, int]] = {}
    for receipt in commit.receipts:
        by_field = ends.setdefault(run.field(receipt.field).domain, {})
        if receipt.rows:
            by_field[receipt.field] = max(by_field.get(receipt.field, 0), receipt.end)
    whole = ends.get("all", {})
    if len(set(whole.values())) > 1:
        (one, end), *others = whole.items()
        other, other_end = next(pair for pair in others if pair[1] != end)
        raise RowCountMismatch(
            f"step {commit.step_id!r}: field {one!r} ends at {end}, field {other!r} at {other_end}: "
            "fields of every token must end together",
            **{one: end, other: other_end},
        )
    return max((whole or ends.get("sampled", {})).values(), default=None)


def check_receipt(
    run: RunRecord,
    epoch: int,
    what: str,
    receipt: Receipt,
    pins: ChunkPins,
    chunks: list[ChunkRow],
    ids: list[ChunkId],
) -> None:
    """Check a receipt that ``what`` brings against its field and its stored chunks; adds to both lists."""
    if receipt.run != run.name:
        raise InvalidInput(f"{what}: receipt of run {receipt.run!r}, not {run.name!r}")
    if receipt.epoch != epoch:
        kind = StaleEpoch if receipt.epoch < epoch else Conflict
        raise kind(
            f"{what}: receipt for {receipt.field!r} is of epoch {receipt.epoch}, the step of epoch {epoch}",
            epoch=epoch,
        )
    field = run.field(receipt.field)
    groups = len(field.groups)
    for chunk in receipt.chunks:
        chunk_id = chunk.chunk_id
        if chunk_id.group or chunk.groups != groups:
            raise InvalidInput(
                f"{what}: chunk {chunk.id} of group {chunk_id.group} has {chunk.groups} "
                f"layer groups, expected group 0 and the {groups} of field {field.name!r}"
            )
        siblings = [chunk_id] if groups == 1 else [chunk_id.sibling(group) for group in range(groups)]
        for sibling in siblings:
            _check_header(what, receipt, chunk, sibling, pins)
        ids += siblings
        chunks.append(
            (chunk_id.to_bytes(), field.name, groups, chunk.start, chunk.rows, chunk.rows * field.row_bytes)
        )


def _check_header(
    what: str, receipt: Receipt, chunk: StoredChunk, chunk_id: ChunkId, pins: ChunkPins
) -> None:
    header = pins.header(chunk_id)
    if header is None or header.run != receipt.run:
        # What another run has stored is told apart by nothing from what does not exist.
        raise lost(what, [chunk_id])
    # Fewer are fine: a recorder trims what its engine took back.
    if header.rows < chunk.rows:
        raise RowCountMismatch(
            f"{what}: chunk {chunk_id.hex} has {header.rows} rows, its receipt {chunk.rows}",
            stored=header.rows,
            receipt=chunk.rows,
        )
    stored = (header.run, header.epoch, header.field, header.start)
    said = (receipt.run, receipt.epoch, receipt.field, chunk.start)
    if stored != said:
        raise InvalidInput(
            f"{what}: chunk {chunk_id.hex} has run, epoch, field and start {stored}, its receipt {said}"
        )
