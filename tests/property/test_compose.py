"""Composing against a plain canvas: one array of (chunk, row) a field, filled position by position."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field as slot

import numpy as np
from hypothesis import given, settings, strategies as st

from arrow_tq.intervals import clip, domain_ranges, gaps, overlay, restrict, subtract, union
from arrow_tq.store.compose import ComposedSegment, StepPath, compose
from arrow_tq_schemas import ChunkId, Field, Receipt, StoredChunk
from arrow_tq_schemas.manifests import Manifest, ranges
from arrow_tq_schemas.spans import Span, Spans, chunk_ids, from_spans, to_spans

LENGTH = 48
FIELDS = (
    Field("token_ids", "int32"),
    Field("kept", "int32", overlay="first"),
    Field("logprobs", "float32", domain="sampled", fill=0.0),
    Field("experts", "uint8", shape=(2,), domain="forwarded", overlay="first"),
    Field("topk", "int32", domain="forwarded", pad=-1),
)
Cell = tuple[int, int]


def chunk_number(index: int) -> ChunkId:
    # Not ascending with time, so that nothing may rely on the order of ids.
    return ChunkId.make(index * 7919 % 1000 + 1, 0, 0, index)


@dataclass
class Numbers:
    """Makes the ids of one example, no two of them equal."""

    made: list[ChunkId] = slot(default_factory=list)

    def next(self) -> ChunkId:
        self.made.append(chunk_number(len(self.made)))
        return self.made[-1]


@st.composite
def receipts(draw: st.DrawFn, numbers: Numbers, field: Field) -> Receipt:
    start = position = draw(st.integers(0, 20))
    chunks = []
    for _ in range(draw(st.integers(0, 3))):
        rows = draw(st.integers(1, 8))
        holes = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=rows, max_size=rows)))
        valid = None if holes is None or field.pad is not None else runs_of(holes)
        chunks.append(
            StoredChunk(
                id=numbers.next().hex, start=position, rows=rows, bytes=rows * field.row_bytes, valid=valid
            )
        )
        position += rows
    return Receipt(run="r", epoch=0, field=field.name, start=start, rows=position - start, chunks=chunks)


def runs_of(valid: Sequence[bool]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index, there in enumerate(valid):
        if there and runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        elif there:
            runs.append((index, index + 1))
    return runs


@st.composite
def paths(draw: st.DrawFn) -> list[StepPath]:
    numbers = Numbers()
    steps = []
    for index in range(draw(st.integers(0, 5))):
        chosen = draw(st.lists(st.sampled_from(FIELDS), max_size=5))
        edges = sorted(draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))
        steps.append(
            StepPath(
                step_id=f"step-{index}",
                sampled=draw(st.sampled_from([None, (edges[0], edges[1])])),
                version=draw(st.sampled_from([None, "1", "2"])),
                rewrite_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 30))) if index else None,
                receipts=[draw(receipts(numbers, field)) for field in chosen],
            )
        )
    return steps


class Canvas:
    """The model: one cell a position, no intervals anywhere."""

    def __init__(self) -> None:
        self.cells: dict[str, list[Cell | None]] = {field.name: [None] * LENGTH for field in FIELDS}
        self.end = 0
        self.sampled = np.zeros(LENGTH, dtype=bool)
        self.loss = np.zeros(LENGTH, dtype=bool)
        self.owned: set[int] = set()
        self.versions: list[str] = []

    def rewrite(self, position: int) -> None:
        for cells in self.cells.values():
            cells[position:] = [None] * (LENGTH - position)
        self.end = min(self.end, position)
        self.sampled[position:] = False
        self.sampled_before = self.sampled.copy()
        self.loss[:] = False
        self.owned = set()
        self.versions = []

    def lay(self, step: StepPath) -> None:
        by_name = {field.name: field for field in FIELDS}
        for receipt in step.receipts:
            field, cells = by_name[receipt.field], self.cells[receipt.field]
            if receipt.rows and field.domain != "forwarded":
                self.end = max(self.end, receipt.end)
            self.owned.update(chunk.chunk_id.value for chunk in receipt.chunks)
            for span in receipt.spans():
                for offset in range(span.rows):
                    position = span.start + offset
                    if field.overlay == "last" or cells[position] is None:
                        cells[position] = (span.chunk_id.value, span.row + offset)
        if step.sampled is not None:
            inside = np.zeros(LENGTH, dtype=bool)
            inside[slice(*step.sampled)] = True
            self.loss |= inside & ~getattr(self, "sampled_before", np.zeros(LENGTH, dtype=bool))
            self.sampled |= inside
        if step.version is not None and step.version not in self.versions:
            self.versions.append(step.version)

    def close(self) -> None:
        self.sampled[self.end :] = False
        self.loss[self.end :] = False

    def domain(self, field: Field) -> np.ndarray:
        inside = np.zeros(LENGTH, dtype=bool)
        inside[: max(self.end - (field.domain == "forwarded"), 0)] = True
        return inside & self.sampled if field.domain == "sampled" else inside


def cells_of(spans: Spans) -> list[Cell | None]:
    cells: list[Cell | None] = [None] * LENGTH
    for span in from_spans(spans):
        for offset in range(span.rows):
            assert cells[span.start + offset] is None, "spans overlap"
            cells[span.start + offset] = (span.chunk_id.value, span.row + offset)
    return cells


def check_form(spans: Spans) -> None:
    """Ascending, not overlapping, nothing left to merge."""
    values = from_spans(spans)
    for before, after in itertools.pairwise(values):
        assert before.end <= after.start
        same_run = before.chunk_id == after.chunk_id and before.row + before.rows == after.row
        assert not (before.end == after.start and same_run)


def flags(pairs: np.ndarray) -> np.ndarray:
    inside = np.zeros(LENGTH, dtype=bool)
    last = -1
    for start, end in pairs.tolist():
        assert last < start < end, "ranges ascend and do not touch"
        inside[start:end] = True
        last = end
    return inside


def owned_of(manifest: Manifest) -> list[int]:
    return [(high << 64) | low for high, low in manifest.owned.tolist()]


@settings(max_examples=400, deadline=None)
@given(paths())
def test_segments_equal_the_plain_canvas(steps: list[StepPath]) -> None:
    segments = compose(steps, FIELDS, lambda index: f"s~{index}")
    canvas, seen = Canvas(), 0
    for index, step in enumerate(steps):
        if step.rewrite_at is not None:
            canvas.close()
            check_segment(segments[seen], canvas, f"s~{seen}", "rewrite")
            seen += 1
            canvas.rewrite(step.rewrite_at)
        canvas.lay(step)
        if index == len(steps) - 1:
            canvas.close()
            check_segment(segments[seen], canvas, f"s~{seen}", "end")
            seen += 1
    assert len(segments) == seen
    owned = {chunk for segment in segments for chunk in owned_of(segment.manifest)}
    assert owned == {
        chunk.chunk_id.value for step in steps for receipt in step.receipts for chunk in receipt.chunks
    }


def check_segment(segment: ComposedSegment, canvas: Canvas, segment_id: str, reason: str) -> None:
    manifest = segment.manifest
    assert (manifest.segment_id, segment.finish_reason) == (segment_id, reason)
    assert manifest.num_tokens == canvas.end
    assert list(manifest.spans) == [field.name for field in FIELDS]
    complete = []
    for field in FIELDS:
        spans, domain = manifest.spans[field.name], canvas.domain(field)
        check_form(spans)
        wanted = [
            cell if there else None for cell, there in zip(canvas.cells[field.name], domain, strict=True)
        ]
        assert cells_of(spans) == wanted, field.name
        if all(cell is not None for cell, there in zip(wanted, domain, strict=True) if there):
            complete.append(field.name)
    assert list(segment.complete_fields) == complete
    assert flags(manifest.sampled).tolist() == canvas.sampled.tolist()
    assert flags(manifest.loss).tolist() == canvas.loss.tolist()
    assert segment.loss_tokens == int(canvas.loss.sum())
    assert list(segment.versions) == canvas.versions
    shown = {chunk.value for spans in manifest.spans.values() for chunk in chunk_ids(spans)}
    assert owned_of(manifest) == sorted(canvas.owned | shown)
    decoded = Manifest.decode(manifest.encode())
    assert decoded.parts() == manifest.parts()


@st.composite
def piles(draw: st.DrawFn) -> Spans:
    spans = [
        Span(draw(st.integers(0, 30)), chunk_number(draw(st.integers(0, 4))), draw(st.integers(0, 9)), rows)
        for rows in draw(st.lists(st.integers(1, 17), max_size=12))
    ]
    return to_spans(spans)


@settings(max_examples=400, deadline=None)
@given(piles(), st.sampled_from(["last", "first"]))
def test_overlay_equals_painting(pile: Spans, policy: str) -> None:
    cells: list[Cell | None] = [None] * LENGTH
    for span in from_spans(pile):
        for offset in range(span.rows):
            if policy == "last" or cells[span.start + offset] is None:
                cells[span.start + offset] = (span.chunk_id.value, span.row + offset)
    visible = overlay(pile, policy)
    check_form(visible)
    assert cells_of(visible) == cells


pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8).map(ranges)


@settings(deadline=None)
@given(piles(), pairs, st.integers(-3, 45), st.integers(-3, 45))
def test_restrict_clip_and_gaps_equal_masks(pile: Spans, some: np.ndarray, start: int, end: int) -> None:
    spans, inside = overlay(pile, "last"), flags(union(some))
    cells = cells_of(spans)
    assert cells_of(restrict(spans, union(some))) == [
        cell if there else None for cell, there in zip(cells, inside, strict=True)
    ]
    window = [start <= position < end for position in range(LENGTH)]
    assert cells_of(clip(spans, start, end)) == [
        cell if there else None for cell, there in zip(cells, window, strict=True)
    ]
    missing = [there and cell is None for cell, there in zip(cells, inside, strict=True)]
    assert flags(gaps(spans, some)).tolist() == missing


@settings(deadline=None)
@given(pairs, pairs)
def test_union_and_subtract_equal_masks(one: np.ndarray, other: np.ndarray) -> None:
    painted = np.zeros(LENGTH, dtype=bool)
    for start, end in one.tolist():
        painted[start:end] = True
    assert flags(union(one)).tolist() == painted.tolist()
    taken = flags(union(other))
    assert flags(subtract(union(one), union(other))).tolist() == (painted & ~taken).tolist()


@settings(deadline=None)
@given(pairs, st.integers(0, 40))
def test_domains_equal_masks(sampled: np.ndarray, num_tokens: int) -> None:
    canvas = Canvas()
    canvas.end, canvas.sampled = num_tokens, flags(union(sampled))
    for field in FIELDS:
        assert flags(domain_ranges(field, num_tokens, sampled)).tolist() == canvas.domain(field).tolist()
