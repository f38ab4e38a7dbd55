"""Dressage: a sample's field as fragments of what was stored, and back.

A fragment is (ref, source start, target start, length): rows of one chunk and where they go. That is a span
of ours, so a layout is a manifest's spans written out, and hydrating reads each chunk's rows once. A position
that no fragment covers is an error here; zeros would train as routing to expert 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay.switch import Switch
from arrow_tq.intervals import ends_of
from arrow_tq.runs import Run
from arrow_tq.trainer import segments
from arrow_tq.trainer.batch import Batch
from arrow_tq.trainer.fetch import fetch
from arrow_tq_schemas.errors import Conflict, Hole, InvalidInput, MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import OWNED_DTYPE, Manifest, ranges
from arrow_tq_schemas.spans import Span, Spans, empty_spans, from_spans, to_spans

LOGPROB_FIELDS = ("logprobs",)
ROUTING_FIELDS = ("routed_experts",)


@dataclass(frozen=True, slots=True)
class Fragment:
    """``length`` rows from ``source_start`` of what ``ref`` names, for positions from ``target_start`` on."""

    ref: str
    source_start: int
    target_start: int
    length: int

    def __post_init__(self) -> None:
        if self.length < 1 or self.source_start < 0 or self.target_start < 0:
            raise MalformedMessage(
                f"fragment of {self.ref!r}: source_start {self.source_start}, target_start "
                f"{self.target_start}, length {self.length}: expected starts from 0 and a length from 1"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """One field of one segment.

    Attributes:
        segment_id: the segment.
        field: the field's name.
        num_tokens: T.
        sampled: half-open ranges of sampled positions: the domain of ``sampled`` fields.
        fragments: by target start, not overlapping.
    """

    segment_id: str
    field: str
    num_tokens: int
    sampled: tuple[tuple[int, int], ...]
    fragments: tuple[Fragment, ...]


def layouts(
    batch: Batch,
    switch: Switch,
    rows: Sequence[int] | None = None,
    logprobs: Sequence[str] = LOGPROB_FIELDS,
    routing: Sequence[str] = ROUTING_FIELDS,
) -> list[dict[str, Layout]]:
    """What travels with each sample in place of its payload: a layout a field. No payload is read.

    With ``Switch.OFF`` each sample's is empty, with ``LOGPROBS`` it has the log-prob fields alone.
    """
    chosen = list(range(len(batch))) if rows is None else [int(row) for row in rows]
    names = [*(logprobs if switch.has_logprobs else ()), *(routing if switch.has_routing else ())]
    if not names:
        return [{} for _ in chosen]
    fields = [batch.run.field(name) for name in names]
    _, manifests = segments.load(
        batch.run.backend, batch.run.name, [batch.segment_ids[row] for row in chosen]
    )
    return [
        {
            field.name: Layout(
                manifest.segment_id,
                field.name,
                manifest.num_tokens,
                tuple((int(start), int(end)) for start, end in manifest.sampled.tolist()),
                _fragments(manifest.spans.get(field.name)),
            )
            for field in fields
        }
        for manifest in manifests
    ]


def hydrate(
    run: Run,
    layouts: Sequence[Layout | None],
    layers: Sequence[int] | None = None,
) -> list[npt.NDArray[np.generic]]:
    """The arrays that the layouts stand for: ``[T, *item]`` each, ``[T-1, *item]`` where forwarded.

    Args:
        run: where the chunks are.
        layouts: all of one field.
        layers: global layer ids; None for all.

    Raises:
        Hole: a layout is missing, or covers less than the field's domain; names field, segment, positions.
        Conflict: fragments overlap, or reach past the segment.
        ChunkReleased, ChunkLost, ChunkPending: naming the chunks.
    """
    given = [_present(place, layout) for place, layout in enumerate(layouts)]
    names = {layout.field for layout in given}
    if len(names) > 1:
        raise InvalidInput(f"layouts of fields {sorted(names)}: expected those of one")
    if not given:
        return []
    field = run.field(given[0].field)
    manifests = [_manifest(field, layout) for layout in given]
    return list(fetch(run.backend, run.name, manifests, [field], layers, reading=run.reading)[field.name])


def _fragments(spans: Spans | None) -> tuple[Fragment, ...]:
    return tuple(
        Fragment(span.chunk_id.hex, span.row, span.start, span.rows)
        for span in from_spans(empty_spans() if spans is None else spans)
    )


def _present(place: int, layout: Layout | None) -> Layout:
    if layout is None:
        raise Hole(f"sample {place} has no layout: its field was not stored, and zeros would be a lie")
    return layout


def _manifest(field: Field, layout: Layout) -> Manifest:
    """The manifest that the layout was written from, as far as a fetch of the field goes."""
    ordered = sorted(layout.fragments, key=lambda fragment: fragment.target_start)
    spans = to_spans(
        Span(fragment.target_start, ChunkId.from_hex(fragment.ref), fragment.source_start, fragment.length)
        for fragment in ordered
    )
    ends = ends_of(spans)
    overlap = np.flatnonzero(spans["start"][1:] < ends[:-1])
    where = f"segment {layout.segment_id!r}, field {field.name!r}"
    if len(overlap):
        raise Conflict(f"{where}: two fragments cover position {int(spans['start'][overlap[0] + 1])}")
    if len(ends) and ends[-1] > layout.num_tokens:
        raise Conflict(
            f"{where}: a fragment ends at {int(ends[-1])}, the segment has {layout.num_tokens} tokens"
        )
    nothing = np.empty(0, OWNED_DTYPE)
    sampled = ranges(layout.sampled)
    return Manifest(layout.segment_id, layout.num_tokens, {field.name: spans}, sampled, ranges([]), nothing)
