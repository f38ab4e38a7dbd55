"""Composing segments: from the receipts of a path's steps to spans. Pure; reads no payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from arrow_tq.intervals import (
    Ranges,
    bounded,
    clip,
    domain_ranges,
    gaps,
    overlay,
    restrict,
    subtract,
    union,
)
from arrow_tq_schemas.errors import InvalidInput, NotFound
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.manifests import OWNED_DTYPE, SPANS_MAX, Manifest, ranges
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans, empty_spans


@dataclass(frozen=True, slots=True)
class StepPath:
    """One step of a path."""

    step_id: str
    sampled: tuple[int, int] | None
    """Half-open absolute range of the tokens that it sampled."""
    version: str | None
    rewrite_at: int | None
    """First position whose token id differs from what was there; None: it only overlays or appends."""
    receipts: Sequence[Receipt]


@dataclass(frozen=True, slots=True, eq=False)
class ComposedSegment:
    """One segment, ready to be stored."""

    manifest: Manifest
    complete_fields: tuple[str, ...]
    """Fields without a hole inside their domain, in declared order."""
    loss_tokens: int
    versions: tuple[str, ...]
    """Versions of the segment's own steps (its context's left out), in order of first use."""
    finish_reason: str
    """``rewrite`` where a later step replaced tokens, else ``end``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Canvas:
    """What a rewrite leaves of the segment before: the context of the next one."""

    spans: dict[str, Spans]
    end: int
    sampled: Ranges


def compose(
    steps: Sequence[StepPath], fields: Sequence[Field], segment_ids: Callable[[int], str]
) -> list[ComposedSegment]:
    """The segments of one path through a session's steps.

    A step with ``rewrite_at`` ends the segment before it. The next one begins with every field's rows at
    positions before ``rewrite_at``; under both overlay policies the rows from there on are gone. Spans
    outside a field's domain are left out of the manifest, so that they read as its fill. A segment owns
    every chunk of its own steps, covered ones included, and the chunks of its context that it still shows.

    Args:
        steps: root first. No step gives no segment.
        fields: every field of the run; each has an entry in each manifest.
        segment_ids: the id of the segment with this index.

    Raises:
        NotFound: a receipt's field is not among ``fields``.
        InvalidInput: a segment of more than ``SPANS_MAX`` spans.
    """
    declared = {field.name: field for field in fields}
    canvas = _Canvas({name: empty_spans() for name in declared}, 0, ranges([]))
    segments: list[ComposedSegment] = []
    parts = _split(steps)
    for index, part in enumerate(parts):
        if index:
            canvas = _cut(canvas, part[0].rewrite_at or 0)
        reason = "end" if part is parts[-1] else "rewrite"
        segment, canvas = _lay(canvas, part, declared, segment_ids(index), reason)
        segments.append(segment)
    return segments


def _split(steps: Sequence[StepPath]) -> list[list[StepPath]]:
    """Steps by segment: a rewrite begins one. The first step has nothing to rewrite."""
    parts: list[list[StepPath]] = []
    for step in steps:
        if step.rewrite_at is not None or not parts:
            parts.append([])
        parts[-1].append(step)
    return parts


def _cut(canvas: _Canvas, position: int) -> _Canvas:
    """The canvas before ``position``: row p-1 was computed from tokens that stay, in every domain."""
    return _Canvas(
        {name: clip(spans, 0, position) for name, spans in canvas.spans.items()},
        min(canvas.end, position),
        bounded(canvas.sampled, 0, position),
    )


def _lay(
    canvas: _Canvas, steps: Sequence[StepPath], declared: dict[str, Field], segment_id: str, reason: str
) -> tuple[ComposedSegment, _Canvas]:
    """One segment of ``steps`` over its context, and what it leaves for the next."""
    chunks = _chunks_by_field(steps, declared)
    whole = {name: _whole(chunks[name]) for name in declared}
    written = {name: _valid_runs(whole[name], chunks[name]) for name in declared}
    visible = {
        name: overlay(np.concatenate([canvas.spans[name], written[name]]), field.overlay)
        for name, field in declared.items()
    }
    num_tokens = max([canvas.end, *_ends(steps, declared)])
    own = bounded(union(ranges([step.sampled for step in steps if step.sampled is not None])), 0, num_tokens)
    sampled = union(np.concatenate([canvas.sampled, own]))
    # What the context sampled carries loss in the segment that it comes from, and nowhere else.
    loss = subtract(own, canvas.sampled)
    domains = {name: domain_ranges(field, num_tokens, sampled) for name, field in declared.items()}
    shown = {name: restrict(visible[name], domains[name]) for name in declared}
    total = sum(len(spans) for spans in shown.values())
    if total > SPANS_MAX:
        raise InvalidInput(f"segment {segment_id!r}: {total} spans, at most {SPANS_MAX}")
    # Spans that are not of the context are parts of the steps' own chunks, which are all owned anyway.
    context = shown.values() if any(len(spans) for spans in canvas.spans.values()) else ()
    manifest = Manifest(segment_id, num_tokens, shown, sampled, loss, _owned([*whole.values(), *context]))
    segment = ComposedSegment(
        manifest,
        tuple(name for name in declared if not len(gaps(shown[name], domains[name]))),
        int((loss[:, 1] - loss[:, 0]).sum()),
        tuple(dict.fromkeys(step.version for step in steps if step.version is not None)),
        reason,
    )
    return segment, _Canvas(visible, num_tokens, sampled)


def _chunks_by_field(steps: Sequence[StepPath], declared: dict[str, Field]) -> dict[str, list[StoredChunk]]:
    """Each field's chunks in the order in which they were written."""
    chunks: dict[str, list[StoredChunk]] = {name: [] for name in declared}
    for step in steps:
        for receipt in step.receipts:
            if receipt.field not in chunks:
                raise NotFound(
                    f"step {step.step_id!r}: field {receipt.field!r} is not among {', '.join(declared)}",
                    field=receipt.field,
                )
            chunks[receipt.field].extend(receipt.chunks)
    return chunks


def _ends(steps: Sequence[StepPath], declared: dict[str, Field]) -> list[int]:
    """Ends of puts that decide T. A put of zero rows covers no position, so it has none."""
    return [
        receipt.end
        for step in steps
        for receipt in step.receipts
        if receipt.rows and declared[receipt.field].domain != "forwarded"
    ]


def _whole(chunks: Sequence[StoredChunk]) -> Spans:
    """One span a chunk, null rows and all."""
    count = len(chunks)
    spans = np.empty(count, dtype=SPAN_DTYPE)
    halves = np.frombuffer(bytes.fromhex("".join(map(attrgetter("id"), chunks))), dtype=">u8")
    spans["high"], spans["low"] = halves[0::2], halves[1::2]
    spans["start"] = np.fromiter(map(attrgetter("start"), chunks), np.int64, count)
    spans["rows"] = np.fromiter(map(attrgetter("rows"), chunks), np.int64, count)
    spans["row"] = 0
    return spans


def _valid_runs(spans: Spans, chunks: Sequence[StoredChunk]) -> Spans:
    """One span a run of rows that are not null: ``StoredChunk.spans`` without an object a span."""
    holed = [index for index, runs in enumerate(map(attrgetter("valid"), chunks)) if runs is not None]
    if not holed:
        return spans
    counts = np.ones(len(chunks), dtype=np.int64)
    counts[holed] = [len(chunks[index].valid or ()) for index in holed]
    chosen = np.zeros(len(chunks), dtype=np.bool_)
    chosen[holed] = True
    split = np.repeat(spans, counts)
    inside = np.repeat(chosen, counts)
    runs = ranges([run for index in holed for run in chunks[index].valid or ()])
    split["row"][inside] = runs[:, 0]
    split["rows"][inside] = runs[:, 1] - runs[:, 0]
    split["start"][inside] += runs[:, 0]
    return split


def _owned(spans: Sequence[Spans]) -> npt.NDArray[np.void]:
    """Distinct chunk ids of these spans, ascending."""
    ids = np.empty(sum(len(part) for part in spans), dtype=OWNED_DTYPE)
    for half in ("high", "low"):
        ids[half] = np.concatenate([np.empty(0, "<u8"), *[part[half] for part in spans]])
    high, low = ids["high"], ids["low"]
    if ((high[1:] < high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] < low[:-1]))).any():
        ids = ids[np.lexsort((low, high))]
    distinct = np.ones(len(ids), dtype=np.bool_)
    distinct[1:] = (ids["high"][1:] != ids["high"][:-1]) | (ids["low"][1:] != ids["low"][:-1])
    return ids[distinct]
