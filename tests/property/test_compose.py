"""Composing against a plain canvas: one array of (chunk, row) a field, filled position by position."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field as slot

import numpy as np
from hypothesis import given, settings, strategies as st

from arrow_tq.intervals import clip, domain_ranges, gaps, overlay, restrict, subtract, union
from arrow_tq.store.compose import ComposedSegment, TreeStep, compose
from arrow_tq_schemas import ChunkId, Field, Receipt, StoredChunk
from arrow_tq_schemas.manifests import Manifest, ranges
from arrow_tq_schemas.spans import Span, Spans, chunk_ids, from_spans, to_spans
from tests.drawing import drawn

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
def trees(draw: st.DrawFn) -> list[TreeStep]:
    """Steps in commit order, each after an earlier one or none, some of them cut off from it."""
    numbers = Numbers()
    steps: list[TreeStep] = []
    for index in range(draw(st.integers(0, 7))):
        chosen = draw(st.lists(st.sampled_from(FIELDS), max_size=5))
        edges = sorted(draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))
        # Mostly chains, with branches here and there.
        parent = index - 1 if draw(st.booleans()) else draw(st.integers(-1, index - 1))
        cut = (
            None
            if parent == -1
            else draw(st.sampled_from([None, None, None, "rewrite", "mismatch", "tools"]))
        )
        whole = cut is None or (cut == "tools" and draw(st.booleans()))
        steps.append(
            TreeStep(
                step_id=f"step-{index}",
                parent=parent,
                sampled=draw(st.sampled_from([None, (edges[0], edges[1])])),
                version=draw(st.sampled_from([None, "1", "2"])),
                rewrite_at=None if whole else draw(st.integers(0, 30)),
                cut=cut,
                receipts=[draw(receipts(numbers, field)) for field in chosen],
            )
        )
    return steps


class Canvas:
    """What one path shows: one cell a position, no intervals anywhere."""

    def __init__(self) -> None:
        self.cells: dict[str, list[Cell | None]] = {field.name: [None] * LENGTH for field in FIELDS}
        self.end = 0
        self.sampler: list[int | None] = [None] * LENGTH
        """By position, the step that sampled its token first."""

    def lay(self, index: int, step: TreeStep) -> None:
        if step.rewrite_at is not None:
            for cells in (*self.cells.values(), self.sampler):
                cells[step.rewrite_at :] = [None] * (LENGTH - step.rewrite_at)
            self.end = min(self.end, step.rewrite_at)
        by_name = {field.name: field for field in FIELDS}
        for receipt in step.receipts:
            field, cells = by_name[receipt.field], self.cells[receipt.field]
            if receipt.rows and field.domain != "forwarded":
                self.end = max(self.end, receipt.end)
            for span in receipt.spans():
                for offset in range(span.rows):
                    position = span.start + offset
                    if field.overlay == "last" or cells[position] is None:
                        cells[position] = (span.chunk_id.value, span.row + offset)
        for position in range(*(step.sampled or (0, 0))):
            if position < self.end and self.sampler[position] is None:
                self.sampler[position] = index

    @property
    def sampled(self) -> np.ndarray:
        return np.array([step is not None for step in self.sampler])

    def domain(self, field: Field) -> np.ndarray:
        inside = np.zeros(LENGTH, dtype=bool)
        inside[: max(self.end - (field.domain == "forwarded"), 0)] = True
        return inside & self.sampled if field.domain == "sampled" else inside


@dataclass
class Wanted:
    """A segment as the rules spell it."""

    path: list[int]
    own: set[int]
    reason: str


def path_to(steps: Sequence[TreeStep], index: int) -> list[int]:
    path = []
    while index != -1:
        path.append(index)
        index = steps[index].parent
    return path[::-1]


def since_cut(steps: Sequence[TreeStep], path: Sequence[int]) -> set[int]:
    """The steps of a path from its last cut on."""
    own = set()
    for index in reversed(path):
        own.add(index)
        if steps[index].cut is not None:
            break
    return own


def wanted_lineage(steps: Sequence[TreeStep]) -> list[Wanted]:
    wanted: list[Wanted] = []
    for index in range(len(steps)):
        children = [child for child in steps if child.parent == index]
        if any(child.cut is None for child in children):
            continue
        path = path_to(steps, index)
        carried = set().union(*(one.own for one in wanted))
        reason = children[0].cut if children else "end"
        wanted.append(Wanted(path, since_cut(steps, path) - carried, reason))
    return wanted


def wanted_timeline(steps: Sequence[TreeStep]) -> list[Wanted]:
    wanted: list[Wanted] = []
    own: set[int] = set()
    for index in range(len(steps)):
        own.add(index)
        reason = "end"
        if index + 1 < len(steps):
            after = steps[index + 1]
            reason = (after.cut or "") if after.parent == index else "branch"
        if reason:
            wanted.append(Wanted(path_to(steps, index), own, reason))
            own = set()
    return wanted


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


@settings(max_examples=drawn(400), deadline=None)
@given(trees(), st.sampled_from(["lineage", "timeline"]))
def test_segments_equal_the_plain_canvas(steps: list[TreeStep], view: str) -> None:
    segments = compose(steps, FIELDS, lambda index: f"s~{index}", view)
    wanted = wanted_lineage(steps) if view == "lineage" else wanted_timeline(steps)
    assert len(segments) == len(wanted)
    losses: Counter[tuple[int, int]] = Counter()
    tokens: set[tuple[int, int]] = set()
    for number, (segment, want) in enumerate(zip(segments, wanted, strict=True)):
        canvas = Canvas()
        for index in want.path:
            canvas.lay(index, steps[index])
        assert (segment.manifest.segment_id, segment.finish_reason) == (f"s~{number}", want.reason)
        check_segment(segment, canvas, steps, want)
        for position, inside in enumerate(flags(segment.manifest.loss)):
            if inside:
                losses[position, canvas.sampler[position]] += 1
        tokens.update(
            (position, sampler) for position, sampler in enumerate(canvas.sampler) if sampler is not None
        )
    # The promise: whatever was sampled carries loss, and only once.
    assert set(losses) == tokens
    assert set(losses.values()) <= {1}
    owned = {chunk for segment in segments for chunk in owned_of(segment.manifest)}
    assert owned == {chunk for step in steps for chunk in chunks_of(step)}


def chunks_of(step: TreeStep) -> set[int]:
    return {chunk.chunk_id.value for receipt in step.receipts for chunk in receipt.chunks}


def check_segment(segment: ComposedSegment, canvas: Canvas, steps: Sequence[TreeStep], want: Wanted) -> None:
    manifest = segment.manifest
    assert manifest.num_tokens == canvas.end
    assert list(manifest.spans) == [field.name for field in FIELDS]
    complete = []
    for field in FIELDS:
        spans, domain = manifest.spans[field.name], canvas.domain(field)
        check_form(spans)
        cells = [
            cell if there else None for cell, there in zip(canvas.cells[field.name], domain, strict=True)
        ]
        assert cells_of(spans) == cells, field.name
        if all(cell is not None for cell, there in zip(cells, domain, strict=True) if there):
            complete.append(field.name)
    assert list(segment.complete_fields) == complete
    assert flags(manifest.sampled).tolist() == canvas.sampled.tolist()
    loss = [step in want.own for step in canvas.sampler]
    assert flags(manifest.loss).tolist() == loss
    assert segment.loss_tokens == sum(loss)
    own = [steps[index].version for index in want.path if index in want.own]
    assert list(segment.versions) == list(dict.fromkeys(version for version in own if version is not None))
    check_versions(manifest, canvas, steps)
    shown = {chunk.value for spans in manifest.spans.values() for chunk in chunk_ids(spans)}
    own_chunks = {chunk for index in want.own for chunk in chunks_of(steps[index])}
    assert owned_of(manifest) == sorted(own_chunks | shown)
    decoded = Manifest.decode(manifest.encode())
    assert decoded.parts() == manifest.parts()


def check_versions(manifest: Manifest, canvas: Canvas, steps: Sequence[TreeStep]) -> None:
    """Each sampled token has the version of the step that sampled it first; ranges are as long as can be."""
    painted: list[str | None] = [None] * LENGTH
    last = (-1, "")
    for start, end, version in manifest.versions:
        assert start < end and last[0] <= start and last != (start, version)
        painted[start:end] = [version] * (end - start)
        last = (end, version)
    assert painted == [None if step is None else steps[step].version for step in canvas.sampler]


@st.composite
def piles(draw: st.DrawFn) -> Spans:
    spans = [
        Span(draw(st.integers(0, 30)), chunk_number(draw(st.integers(0, 4))), draw(st.integers(0, 9)), rows)
        for rows in draw(st.lists(st.integers(1, 17), max_size=12))
    ]
    return to_spans(spans)


@settings(max_examples=drawn(400), deadline=None)
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
    canvas.end = num_tokens
    canvas.sampler = [0 if inside else None for inside in flags(union(sampled))]
    for field in FIELDS:
        assert flags(domain_ranges(field, num_tokens, sampled)).tolist() == canvas.domain(field).tolist()
