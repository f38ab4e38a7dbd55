"""From an engine's output to a committed step. Runs on threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from arrow_tq.adapters import EngineOutput, Rows
from arrow_tq.calls import ask
from arrow_tq.producer.session import Session
from arrow_tq.producer.step import Step
from arrow_tq.proxy.protocols.base import INDEXER, ROUTED
from arrow_tq.proxy.tree import Base, Known, Tokens, digest_of, messages_digest
from arrow_tq.runs import Run
from arrow_tq_schemas.commands import Done, DropChunks
from arrow_tq_schemas.errors import ArrowTQError, RowCountMismatch
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.receipts import Receipt, chunk_ids

LOSS_MASK = "loss_mask"


class CommitFailed(Exception):
    """A commit that went out and was not confirmed: the store may have it, or not."""

    def __init__(self, error: ArrowTQError) -> None:
        super().__init__(error.message)
        self.error = error


def first_id(step_id: str, output: EngineOutput) -> str:
    """Id of the first step of an output: its own, or that of its first part."""
    return f"{step_id}.0" if len(output.versions) > 1 else step_id


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call's step goes."""

    step_id: str
    parent: Known | None
    told_parent: str | None
    """As the store is told: None where it places a repeated call by itself."""
    retry_of: str | None
    base: Base


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What a call's messages were; all None for routes without."""

    whole: Sequence[object] | None
    new: Sequence[object]
    tools: object
    extends: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step that was committed."""

    step: Known
    reference: dict[str, object]
    """What the agent is told: ids, ranges and sizes."""


def record(
    session: Session,
    place: Place,
    said: Said,
    prompt: Tokens,
    output: EngineOutput,
    receipts: Sequence[Receipt],
) -> Recorded:
    """Store what one call brought beyond what its path has, and commit it; or leave nothing.

    An output that several weight versions sampled becomes a step for each; the last has the call's name.

    Raises:
        CommitFailed: whether the store has the step is not known.
        ArrowTQError: it has not.
    """
    parts = output.by_version() if output.versions else [output]
    parent = place.told_parent
    done: list[str] = []
    stored: list[Receipt] = []
    try:
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            name = place.step_id if last else f"{place.step_id}.{index}"
            step = session.step(
                name,
                parent,
                messages=said.new if last else (),
                version=part.version,
                sampled=part.sampled,
                tools=said.tools,
                retry_of=place.retry_of if index == 0 else None,
                extends=said.extends,
            )
            first = prompt[place.base.tokens :] if index == 0 else prompt[:0]
            stored += _write(step, part, first, place.base, receipts if last else ())
            _commit(step)
            done.append(name)
            parent = name
    except BaseException:
        drop(session.run, receipts)
        if done:
            with suppress(ArrowTQError):
                session.abandon(done[0])
        raise
    return _recorded(session, place, said, prompt, output, [*stored, *receipts])


def drop(run: Run, receipts: Sequence[Receipt]) -> None:
    """Free what an engine stored for a call that is not recorded."""
    ids = [chunk.hex for chunk in chunk_ids(receipts)]
    if not ids:
        return
    try:
        ask(run.backend, DropChunks(run=run.name, chunk_ids=ids), Done)
    except ArrowTQError:
        # The store reaps them itself: nothing attached them.
        return


def check_receipts(receipts: Sequence[Receipt], fields: frozenset[str], start: int, rows_end: int) -> None:
    """Raises ``RowCountMismatch`` where receipts do not cover ``[start, rows_end)`` of each field."""
    for name in sorted(fields):
        end = start
        for receipt in sorted((one for one in receipts if one.field == name), key=lambda one: one.start):
            if receipt.start > end:
                break
            end = max(end, receipt.end)
        if end != max(rows_end, start):
            raise RowCountMismatch(
                f"receipts of {name!r} cover [{start}, {end}), expected [{start}, {rows_end})",
                field=name,
                end=end,
                expected=rows_end,
            )


def _write(
    step: Step, part: EngineOutput, first: Tokens, base: Base, receipts: Sequence[Receipt]
) -> list[Receipt]:
    """Put a part's rows: tokens in one piece with those of the prompt, other fields from their gap on."""
    stored: list[Receipt] = []
    try:
        for receipt in receipts:
            step.attach(receipt)
        sampled = part.token_ids.values if part.token_ids is not None else first[:0]
        tokens = np.concatenate([first, sampled]) if len(first) else sampled
        if len(tokens):
            stored.append(step.put(TOKEN_FIELD, tokens, start=part.prompt_tokens - len(first)))
        for rows in part.rows():
            if rows.field.name == TOKEN_FIELD:
                continue
            missing = rows.between(base.covered, rows.end) if rows.field.domain == "forwarded" else rows
            if len(missing):
                stored.append(step.put(rows.field.name, missing.array, start=missing.start))
        mask = step.session.run.fields.get(LOSS_MASK)
        if mask is not None and part.completion_tokens:
            ones = np.ones(part.completion_tokens, mask.type.numpy)
            stored.append(step.put(LOSS_MASK, ones, start=part.prompt_tokens))
    except BaseException:
        step.cancel()
        raise
    return stored


def _commit(step: Step) -> None:
    try:
        step.flush()
    except BaseException:
        step.cancel()
        raise
    try:
        step.commit()
    except ArrowTQError as error:
        if error.retryable or error.code == "internal":
            raise CommitFailed(error) from None
        raise


def _recorded(
    session: Session,
    place: Place,
    said: Said,
    prompt: Tokens,
    output: EngineOutput,
    receipts: Sequence[Receipt],
) -> Recorded:
    sampled = output.token_ids.values if output.token_ids is not None else prompt[:0]
    tokens = np.concatenate([prompt, sampled]).astype(np.int32)
    step = Known(
        place.step_id,
        place.parent,
        end=len(tokens),
        digest=digest_of(tokens),
        covered=_covered(session.run, place.base, output, receipts, len(tokens)),
    )
    if said.whole is not None:
        step = replace(step, messages=len(said.whole), messages_digest=messages_digest(said.whole))
    fields: dict[str, dict[str, int]] = {}
    for receipt in receipts:
        entry = fields.setdefault(receipt.field, {"start": receipt.start, "rows": 0, "chunks": 0, "bytes": 0})
        entry["start"] = min(entry["start"], receipt.start)
        entry["rows"] += receipt.rows
        entry["chunks"] += len(receipt.chunks)
        entry["bytes"] += sum(chunk.bytes for chunk in receipt.chunks)
    reference: dict[str, object] = {
        "recorded": True,
        "run": session.run.name,
        "session": session.id,
        "step": place.step_id,
        "sampled": list(output.sampled),
        "fields": fields,
    }
    return Recorded(step, reference)


def _covered(run: Run, base: Base, output: EngineOutput, receipts: Sequence[Receipt], tokens: int) -> int:
    """First position that lacks a row of some field of forwarded tokens."""
    ends = []
    for name, rows in ((ROUTED, output.routed_experts), (INDEXER, output.indexer_topk)):
        if name not in run.fields:
            continue
        attached = [one.end for one in receipts if one.field == name]
        if rows is not None:
            ends.append(max(base.covered, _first_null(rows.between(base.covered, rows.end))))
        else:
            ends.append(max([base.covered, *attached]))
    return min(ends, default=tokens)


def _first_null(rows: Rows) -> int:
    if rows.valid is None or rows.valid.all():
        return rows.end
    return rows.start + int(np.argmin(rows.valid))
