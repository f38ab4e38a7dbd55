"""Any tree of steps, with retries, replays and abandoned ones, equals plain arrays: one a path."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field as slot
from itertools import count, zip_longest
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.interface import Store
from arrow_tq.producer.session import Session
from arrow_tq.runs import Run
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.commands import GetSegments
from arrow_tq_schemas.manifests import Manifest
from tests.drawing import drawn

TOKENS_MAX = 24
FIELDS = [
    fields.token_ids(),
    Field("last", "float32", domain="forwarded", fill=-1.0),
    Field("first", "int16", (3,), domain="forwarded", overlay="first", fill=9),
    Field("seen", "int32", domain="sampled", fill=7),
    fields.routed_experts(layer_ids=[0, 2, 5], topk=2, num_experts=300, layer_groups=[[0], [2, 5]]),
]
EDGES = ("version_min", "version_max")
View = Literal["lineage", "timeline"]
_names = count()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder, arrow_tq.open(folder, capacity_bytes=2 << 30) as store:
        yield store


@dataclass
class Step:
    """A step as the model keeps it, with all that its path shows."""

    name: str
    parent: str | None
    version: str
    cut: str | None = None
    counts: bool = True
    end: int = 0
    values: dict[str, npt.NDArray[np.generic]] = slot(default_factory=dict, repr=False)
    written: dict[str, npt.NDArray[np.bool_]] = slot(default_factory=dict, repr=False)
    sampler: list[str | None] = slot(default_factory=lambda: [None] * TOKENS_MAX, repr=False)
    """By position, the step that sampled its token first."""

    def inherit(self, parent: Step | None) -> None:
        for one in FIELDS:
            blank = np.zeros((TOKENS_MAX, *one.shape), one.type.numpy), np.zeros(TOKENS_MAX, bool)
            values, written = blank if parent is None else (parent.values[one.name], parent.written[one.name])
            self.values[one.name], self.written[one.name] = values.copy(), written.copy()
        if parent is not None:
            self.end, self.sampler = parent.end, list(parent.sampler)

    def rewrite(self, position: int) -> None:
        for written in self.written.values():
            written[position:] = False
        self.end = min(self.end, position)
        self.sampler[position:] = [None] * (TOKENS_MAX - position)

    def put(
        self, one: Field, start: int, rows: npt.NDArray[np.generic], valid: npt.NDArray[np.bool_]
    ) -> None:
        for offset in np.flatnonzero(valid):
            place = start + offset
            if not (one.overlay == "first" and self.written[one.name][place]):
                self.values[one.name][place] = rows[offset]
                self.written[one.name][place] = True
        if len(rows) and one.domain != "forwarded":
            self.end = max(self.end, start + len(rows))

    def sample(self, start: int, end: int) -> None:
        for place in range(start, min(end, self.end)):
            self.sampler[place] = self.sampler[place] or self.name


class Model:
    """The session's tree, kept beside the store."""

    def __init__(self, session: Session, seed: int) -> None:
        self.session = session
        self.random = np.random.default_rng(seed)
        self.steps: dict[str, Step] = {}
        self.puts: dict[str, list[tuple[str, npt.NDArray[np.generic], int]]] = {}
        self.calls: dict[str, dict[str, object]] = {}

    @property
    def live(self) -> list[Step]:
        return [step for step in self.steps.values() if step.counts]

    def commit(self, parent: str | None, data: st.DataObject, retry_of: str | None = None) -> None:
        """A step somewhere in the tree; its tokens go on from its path, repeat it, or depart from it."""
        before = None if parent is None else self.steps[parent]
        step = Step(f"n{len(self.steps)}", parent, str(len(self.steps) // 3))
        step.inherit(before)
        start = data.draw(st.integers(0, step.end), label="start")
        end = data.draw(st.integers(start + 1, min(max(step.end, start) + 4, TOKENS_MAX)), label="end")
        tokens = self.random.integers(0, 1000, end - start).astype(np.int32)
        overlap = min(step.end, end)
        tokens[: max(overlap - start, 0)] = step.values["token_ids"][start:overlap]
        if overlap > start and data.draw(st.booleans(), label="departs"):
            position = data.draw(st.integers(start, overlap - 1), label="position")
            if step.written["token_ids"][position]:
                tokens[position - start :] = self.random.integers(1000, 2000, end - position)
                step.rewrite(position)
                step.cut = "rewrite"
        puts: list[tuple[str, npt.NDArray[np.generic], int]] = [("token_ids", tokens, start)]
        step.put(FIELDS[0], start, tokens, np.ones(len(tokens), bool))
        for one in FIELDS[1:]:
            if data.draw(st.booleans(), label=one.name):
                first = data.draw(st.integers(0, end - 1), label="first")
                rows = int(self.random.integers(0, end - first + 1))
                shown, stored, valid = self._rows(one, rows)
                puts.append((one.name, shown, first))
                step.put(one, first, stored, valid)
        edges = sorted(data.draw(st.tuples(st.integers(0, TOKENS_MAX), st.integers(0, TOKENS_MAX))))
        step.sample(*edges)
        self.calls[step.name] = {"version": step.version, "sampled": tuple(edges)}
        if retry_of is None:
            at_last = self.live and self.live[-1].name == parent
            place = {} if at_last and data.draw(st.booleans(), label="unsaid") else {"parent": parent or ""}
        else:
            place = {"retry_of": retry_of}
        self.puts[step.name] = puts
        self.call(step.name, **place)
        if retry_of is not None:
            self.leave_out(retry_of)
        self.steps[step.name] = step

    def call(self, name: str, **place: object) -> None:
        with self.session.step(id=name, **self.calls[name], **place) as step:  # type: ignore[arg-type]
            for field, rows, start in self.puts[name]:
                step.put(field, rows, start=start)

    def leave_out(self, name: str) -> int:
        gone = {name}
        for step in self.steps.values():
            if step.parent in gone:
                gone.add(step.name)
        counted = [step for step in self.steps.values() if step.name in gone and step.counts]
        for step in counted:
            step.counts = False
        return len(counted)

    def _rows(
        self, one: Field, rows: int
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
        shape = (rows, *one.shape)
        valid = np.ones(rows, bool)
        if one.num_experts:
            shown = self.random.integers(0, one.num_experts, shape)
            valid = self.random.random(rows) < 0.8
            shown[~valid] = -1
            return shown, shown.astype(np.uint16), valid
        values = self.random.integers(-1, 100, shape).astype(one.type.numpy)
        return values, values, valid


@dataclass
class Segment:
    last: Step
    own: list[Step]
    reason: str


def lineage(live: list[Step]) -> list[Segment]:
    by_name = {step.name: step for step in live}
    found: list[Segment] = []
    for step in live:
        after = [one for one in live if one.parent == step.name]
        if any(one.cut is None for one in after):
            continue
        own, at = [step], step
        while at.cut is None and at.parent is not None:
            at = by_name[at.parent]
            own.append(at)
        found.append(Segment(step, own, after[0].cut or "" if after else "end"))
    return found


def timeline(live: list[Step]) -> list[Segment]:
    found: list[Segment] = []
    own: list[Step] = []
    for step, after in zip_longest(live, live[1:]):
        own.append(step)
        if after is None or after.cut is not None or after.parent != step.name:
            reason = "end" if after is None else (after.cut or "") if after.parent == step.name else "branch"
            found.append(Segment(step, own, reason))
            own = []
    return found


@settings(max_examples=drawn(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(0, 2**32 - 1))
def test_every_path_equals_its_arrays(store: Store, data: st.DataObject, seed: int) -> None:
    run = store.run("trees", fields=FIELDS)
    stored = store.stats()["chunks"]
    model = Model(run.session(f"s-{next(_names)}"), seed)
    for _ in range(data.draw(st.integers(1, 8), label="operations")):
        live = [step.name for step in model.live]
        kind = data.draw(st.sampled_from(["step", "step", "step", "branch", "retry", "abandon", "again"]))
        if kind in ("step", "branch") or not live:
            last = live[-1] if live else None
            model.commit(last if kind == "step" else data.draw(st.sampled_from([None, *live])), data)
        elif kind == "retry":
            attempt = data.draw(st.sampled_from(live), label="attempt")
            model.commit(model.steps[attempt].parent, data, retry_of=attempt)
        elif kind == "abandon":
            name = data.draw(st.sampled_from(live), label="abandoned")
            assert model.session.abandon(name) == model.leave_out(name)
        else:
            model.call(data.draw(st.sampled_from(list(model.steps)), label="again"))
    views: list[tuple[View, list[Segment]]] = [
        ("lineage", lineage(model.live)),
        ("timeline", timeline(model.live)),
    ]
    for view, wanted in data.draw(st.permutations(views)):
        found = model.session.finalize(view)
        assert [one.finish_reason for one in found] == [one.reason for one in wanted]
    batches = [(run.claim(100, view=view), view, wanted) for view, wanted in views]
    for batch, view, wanted in batches:
        check(run, batch, view, model, wanted)
        batch.release()
    assert store.stats()["chunks"] == stored


def check(run: Run, batch: Batch, view: View, model: Model, wanted: list[Segment]) -> None:
    assert len(batch) == len(wanted)
    if not wanted:
        return
    command = GetSegments(run=run.name, ids=[model.session.id], view=view)
    manifests = [Manifest.decode(raw) for raw in run.backend.execute(command).blobs[1:]]
    losses: Counter[tuple[int, str | None]] = Counter()
    carried: set[str] = set()
    for row, (manifest, segment) in enumerate(zip(manifests, wanted, strict=True)):
        step = segment.last
        assert manifest.num_tokens == step.end
        own = {one.name for one in segment.own} - carried
        carried |= own
        loss = {place for place, sampler in enumerate(step.sampler) if sampler in own}
        assert loss == {place for start, end in manifest.loss.tolist() for place in range(start, end)}
        losses.update((place, step.sampler[place]) for place in loss)
        versions = [None if name is None else model.steps[name].version for name in step.sampler]
        painted: list[str | None] = [None] * TOKENS_MAX
        for start, end, version in manifest.versions:
            painted[start:end] = [version] * (end - start)
        assert painted == versions
        check_versions(batch, row, {model.steps[name].version for name in own}, versions[: step.end])
        for one in FIELDS:
            check_field(batch, row, one, step)
    # Within a view every token that was sampled carries loss exactly once.
    sampled = {(place, name) for step in model.live for place, name in enumerate(step.sampler) if name}
    assert set(losses) == sampled
    assert set(losses.values()) <= {1}


def check_versions(batch: Batch, row: int, own: set[str], wanted: list[str | None]) -> None:
    """A fetch, of this segment alone and behind another, gives each token's version; columns the ends of
    those of its own steps."""
    for rows in ([row], [0, row]):
        versions = batch.fetch([], rows=rows).versions
        codes = versions[len(rows) - 1]
        assert codes.dtype == np.int32
        assert [None if code < 0 else versions.names[code] for code in codes.tolist()] == wanted
        painted: list[str | None] = [None] * len(wanted)
        for start, end, version in versions.ranges(len(rows) - 1):
            painted[start:end] = [version] * (end - start)
        assert painted == wanted
    (low,), (high,) = (batch.table.column(name)[row : row + 1].to_pylist() for name in EDGES)
    # The model names versions by numbers that grow.
    assert (low, high) == (min(own, key=int), max(own, key=int))


def check_field(batch: Batch, row: int, one: Field, step: Step) -> None:
    rows = max(step.end - (one.domain == "forwarded"), 0)
    inside = np.arange(TOKENS_MAX) < rows
    if one.domain == "sampled":
        inside &= np.array([name is not None for name in step.sampler])
    holes = np.flatnonzero(inside & ~step.written[one.name])
    if len(holes):
        with pytest.raises(errors.Hole, match=f"{one.name}.*{holes[0]}"):
            batch.fetch(one.name, rows=[row])
        return
    expected = step.values[one.name].copy()
    expected[~inside] = one.fill_value
    np.testing.assert_array_equal(batch.fetch(one.name, rows=[row])[one.name][0], expected[:rows])
