"""Composing segments: from the receipts of a tree's steps to spans. Pure; reads no payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

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
from arrow_tq.store.compose_plain import plain_segment
from arrow_tq.store.receipt_spans import chunks_by_field, joined, owned_ids, valid_runs, whole_spans
from arrow_tq.store.trees import NO_PARENT, VIEWS, Stretch, breaks
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.manifests import SPANS_MAX, Manifest, ranges
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import Spans, empty_spans


@dataclass(frozen=True, slots=True)
class TreeStep:
    """One step of a session's tree."""

    step_id: str
    parent: int
    """Index of the step before it among those given, which is smaller; ``NO_PARENT``: none."""
    sampled: tuple[int, int] | None
    """Half-open absolute range of the tokens that it sampled."""
    version: str | None
    rewrite_at: int | None
    """First position whose token id differs from what its path had; None: it only overlays or appends."""
    cut: str | None
    """Why it does not go on with its parent's segment: ``rewrite``, ``mismatch`` or ``tools``."""
    receipts: Sequence[Receipt]


@dataclass(frozen=True, slots=True, eq=False)
class ComposedSegment:
    """One segment, ready to be stored."""

    manifest: Manifest
    complete_fields: tuple[str, ...]
    """Fields without a hole inside their domain, in declared order."""
    loss_tokens: int
    versions: tuple[str, ...]
    """Versions of the steps whose loss the segment carries, in order of first use."""
    finish_reason: str
    """Why the segment ends: ``end``, ``rewrite``, ``mismatch``, ``tools`` or ``branch``."""
    last: int
    """Index of its last step; its path leads from there to the root."""


@dataclass(frozen=True, slots=True, eq=False)
class _Canvas:
    """What a path shows after one of its steps."""

    spans: dict[str, Spans]
    end: int
    sampled: Ranges
    versions: tuple[tuple[Ranges, str], ...]
    """Sampled positions by version: each position once, under the version that sampled it first."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """Steps that follow one another and are in the same segments."""

    first: int
    canvas: _Canvas
    """After its last step."""
    whole: list[Spans]
    """Every chunk of its steps, null rows and all."""
    fresh: Ranges
    """Positions that were sampled here and nowhere before on the path."""
    versions: tuple[str, ...]


def compose(
    steps: Sequence[TreeStep],
    fields: Sequence[Field],
    segment_ids: Callable[[int], str],
    view: str = "lineage",
) -> list[ComposedSegment]:
    """The segments of one view of a session's tree.

    A segment shows the whole path from the root to its last step. Steps that no earlier segment of the
    view carried are its own to train: it carries their loss and owns every chunk of theirs, covered ones
    included. All else is context: of that it owns the chunks that it still shows.

    A step with ``rewrite_at`` goes on from every field's rows at positions before it; under both overlay
    policies the rows from there on are gone. A step samples positions that exist once it is committed;
    sampled again on the same path, a token carries the loss of the first time. Spans outside a field's
    domain are left out of the manifest, so that they read as its fill.

    Args:
        steps: in commit order, without those that do not count. No step gives no segment.
        fields: every field of the run; each has an entry in each manifest.
        segment_ids: the id of the segment with this index.
        view: ``lineage`` or ``timeline``.

    Raises:
        NotFound: a receipt's field is not among ``fields``.
        InvalidInput: a segment of more than ``SPANS_MAX`` spans.
    """
    declared = {field.name: field for field in fields}
    plain = _plain(steps, declared, segment_ids)
    return _compose(steps, declared, segment_ids, view) if plain is None else [plain]


def _plain(
    steps: Sequence[TreeStep], declared: Mapping[str, Field], segment_ids: Callable[[int], str]
) -> ComposedSegment | None:
    found = plain_segment(steps, declared, segment_ids(0))
    if found is None or sum(map(len, found[0].spans.values())) > SPANS_MAX:
        return None
    manifest, complete = found
    versions = tuple(dict.fromkeys(step.version for step in steps if step.version is not None))
    loss_tokens = sum(end - start for start, end in manifest.loss.tolist())
    return ComposedSegment(manifest, complete, loss_tokens, versions, "end", len(steps) - 1)


def _compose(
    steps: Sequence[TreeStep],
    declared: Mapping[str, Field],
    segment_ids: Callable[[int], str],
    view: str,
) -> list[ComposedSegment]:
    parents, cuts = [step.parent for step in steps], [step.cut for step in steps]
    stretches = VIEWS[view](parents, cuts)
    chains: dict[int, _Chain] = {}
    for last in breaks(parents, cuts, stretches):
        chains[last] = _chain(steps, last, chains, declared)
    carried: set[int] = set()
    segments: list[ComposedSegment] = []
    for index, stretch in enumerate(stretches):
        path = _own_chains(stretch, chains, parents)
        own = [chains[last] for last in path if last not in carried]
        carried.update(path)
        canvas = chains[stretch.last].canvas
        alone = len(own) == len(path) and parents[stretch.first] == NO_PARENT
        segments.append(_segment(segment_ids(index), canvas, own, alone, declared, stretch))
    return segments


def _chain(
    steps: Sequence[TreeStep], last: int, chains: Mapping[int, _Chain], declared: Mapping[str, Field]
) -> _Chain:
    """The steps up to ``last`` since the chains that are there, laid over what they go on from."""
    path = [last]
    while steps[path[-1]].parent != NO_PARENT and steps[path[-1]].parent not in chains:
        path.append(steps[path[-1]].parent)
    path.reverse()
    first = steps[path[0]]
    before = _Canvas({name: empty_spans() for name in declared}, 0, ranges([]), ())
    if first.parent != NO_PARENT:
        before = chains[first.parent].canvas
        if first.rewrite_at is not None:
            before = _cut(before, first.rewrite_at)
    return _lay(path[0], [steps[index] for index in path], before, declared)


def _own_chains(stretch: Stretch, chains: Mapping[int, _Chain], parents: Sequence[int]) -> list[int]:
    """The last steps of the chains that a stretch is made of, first chain first."""
    path = [stretch.last]
    while chains[path[-1]].first != stretch.first:
        path.append(parents[chains[path[-1]].first])
    return path[::-1]


def _cut(canvas: _Canvas, position: int) -> _Canvas:
    """The canvas before ``position``: row p-1 was computed from tokens that stay, in every domain."""
    return _Canvas(
        {name: clip(spans, 0, position) for name, spans in canvas.spans.items()},
        min(canvas.end, position),
        bounded(canvas.sampled, 0, position),
        tuple((bounded(some, 0, position), version) for some, version in canvas.versions),
    )


def _lay(first: int, steps: Sequence[TreeStep], before: _Canvas, declared: Mapping[str, Field]) -> _Chain:
    chunks = chunks_by_field(steps, declared)
    whole = {name: whole_spans(chunks[name]) for name in declared}
    visible = {
        name: overlay(joined([before.spans[name], valid_runs(whole[name], chunks[name])]), one.overlay)
        for name, one in declared.items()
    }
    ends = np.maximum.accumulate([before.end, *(_end(step, declared) for step in steps)])[1:].tolist()
    sampled, versions = before.sampled, list(before.versions)
    said_any = any(step.sampled is not None for step in steps)
    # Of steps of one version only what they sampled together is asked, so that there is no work a step.
    for version, some in groupby(zip(steps, ends, strict=True), key=_version) if said_any else ():
        said = ranges([np.minimum(step.sampled, end) for step, end in some if step.sampled is not None])
        new = subtract(union(said), sampled)
        sampled = union(np.concatenate([sampled, new]))
        if version is not None and len(new):
            versions.append((new, version))
    return _Chain(
        first,
        _Canvas(visible, ends[-1], sampled, tuple(versions)),
        list(whole.values()),
        subtract(sampled, before.sampled) if said_any else sampled[:0],
        tuple(dict.fromkeys(step.version for step in steps if step.version is not None)),
    )


def _version(pair: tuple[TreeStep, int]) -> str | None:
    return pair[0].version


def _segment(
    segment_id: str,
    canvas: _Canvas,
    own: Sequence[_Chain],
    alone: bool,
    declared: Mapping[str, Field],
    stretch: Stretch,
) -> ComposedSegment:
    """One segment of a path.

    Args:
        segment_id: its id.
        canvas: what the path shows.
        own: the chains whose loss it carries.
        alone: whether these are the whole path.
        declared: the run's fields by name.
        stretch: its own steps, and why it ends.
    """
    domains = {name: domain_ranges(one, canvas.end, canvas.sampled) for name, one in declared.items()}
    shown = {name: restrict(canvas.spans[name], domains[name]) for name in declared}
    total = sum(len(spans) for spans in shown.values())
    if total > SPANS_MAX:
        raise InvalidInput(f"segment {segment_id!r}: {total} spans, at most {SPANS_MAX}")
    # What its own steps show are parts of their chunks, which are owned anyway.
    context = () if alone else shown.values()
    owned = owned_ids([*(spans for chain in own for spans in chain.whole), *context])
    loss = union(np.concatenate([ranges([]), *(chain.fresh for chain in own)]))
    manifest = Manifest(
        segment_id, canvas.end, shown, canvas.sampled, loss, owned, _version_ranges(canvas.versions)
    )
    return ComposedSegment(
        manifest,
        tuple(name for name in declared if not len(gaps(shown[name], domains[name]))),
        int((loss[:, 1] - loss[:, 0]).sum()),
        tuple(dict.fromkeys(version for chain in own for version in chain.versions)),
        stretch.reason,
        stretch.last,
    )


def _version_ranges(versions: Sequence[tuple[Ranges, str]]) -> tuple[tuple[int, int, str], ...]:
    """Ascending (start, end, version), neighbours of one version made one."""
    by_version: dict[str, list[Ranges]] = {}
    for some, version in versions:
        by_version.setdefault(version, []).append(some)
    return tuple(
        sorted(
            (start, end, version)
            for version, parts in by_version.items()
            for start, end in union(np.concatenate(parts)).tolist()
        )
    )


def _end(step: TreeStep, declared: Mapping[str, Field]) -> int:
    """End of the puts that decide T. A put of zero rows covers no position, so it has none."""
    return max(
        (
            receipt.end
            for receipt in step.receipts
            if receipt.rows and declared[receipt.field].domain != "forwarded"
        ),
        default=0,
    )
