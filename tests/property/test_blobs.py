"""References to blobs equal a model of them, whatever is attached, left out, trained or thrown away."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field as slot
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import arrow_tq
from arrow_tq import Task, errors, fields
from arrow_tq.interface import Store
from arrow_tq.producer.session import Session
from arrow_tq.runs import Run
from arrow_tq.store.trees import NO_PARENT, VIEWS
from arrow_tq_schemas.blobs import blob_id

CONTENTS = [b"", b"a", b"b" * 70_000, b"c" * 9]
TASKS = ("actor", "critic")
_names = count()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder, arrow_tq.open(folder, capacity_bytes=1 << 30) as store:
        yield store


@dataclass
class Step:
    name: str
    parent: str | None
    contents: list[bytes]
    counts: bool = True


@dataclass
class Rollout:
    """A session as the model keeps it."""

    session: Session
    steps: list[Step] = slot(default_factory=list)
    state: str = "open"
    owed: dict[str, dict[str, set[str]]] = slot(default_factory=dict)
    """By view and segment, the tasks that are not done with it."""
    paths: dict[str, list[Step]] = slot(default_factory=dict)
    done: dict[str, set[str]] = slot(default_factory=dict)
    """By view, tasks that have released something there."""

    def held(self) -> list[bytes]:
        if self.state == "open":
            return [one for step in self.steps if step.counts for one in step.contents]
        kept = {
            step.name
            for segments in self.owed.values()
            for name, tasks in segments.items()
            if tasks
            for step in self.paths[name]
        }
        return [one for step in self.steps if step.name in kept for one in step.contents]

    def leave_out(self, name: str) -> None:
        gone = {name}
        for step in self.steps:
            if step.parent in gone:
                gone.add(step.name)
            if step.name in gone:
                step.counts = False

    def finalize(self, view: str) -> None:
        live = [step for step in self.steps if step.counts]
        places = {step.name: place for place, step in enumerate(live)}
        parents = [NO_PARENT if step.parent is None else places[step.parent] for step in live]
        segments = self.session.finalize(view)  # type: ignore[arg-type]
        stretches = VIEWS[view](parents, [None] * len(live))
        assert len(segments) == len(stretches)
        self.state = "finalized"
        self.owed[view] = {}
        for segment, stretch in zip(segments, stretches, strict=True):
            path, at = [], stretch.last
            while at != NO_PARENT:
                path.append(live[at])
                at = parents[at]
            self.paths[segment.segment_id] = path
            self.owed[view][segment.segment_id] = set(TASKS)

    def finish(self, view: str, names: list[str], task: str) -> None:
        """A task released these."""
        for name in names:
            self.owed[view][name].discard(task)
        self.done.setdefault(view, set()).add(task)
        self.settle()

    def settle(self) -> None:
        """A task that trained in one view and is done with it is done with those that it never claimed."""
        for view, tasks in self.done.items():
            for task in tasks:
                if any(task in left for left in self.owed[view].values()):
                    continue
                for other, segments in self.owed.items():
                    if other != view and task not in self.done.get(other, set()):
                        for left in segments.values():
                            left.discard(task)


class Model:
    def __init__(self, store: Store, data: st.DataObject) -> None:
        self.store = store
        self.data = data
        tasks = [Task("actor"), Task("critic", fields=["logprobs"])]
        declared = [fields.token_ids(), fields.logprobs()]
        self.run: Run = store.run(f"run-{next(_names)}", fields=declared, tasks=tasks)
        self.rollouts: list[Rollout] = []

    def act(self) -> None:
        kind = self.data.draw(st.sampled_from(ACTIONS), label="action")
        if kind == "open" or not self.rollouts:
            self.rollouts.append(Rollout(self.run.session(f"s-{len(self.rollouts)}")))
            return
        getattr(self, kind)(self.data.draw(st.sampled_from(self.rollouts), label="rollout"))

    def step(self, rollout: Rollout, retry_of: Step | None = None) -> None:
        if rollout.state != "open":
            return
        live = [step for step in rollout.steps if step.counts]
        parent = self.data.draw(st.sampled_from([None, *(step.name for step in live)]), label="parent")
        if retry_of is not None:
            parent = retry_of.parent
        contents = self.data.draw(st.lists(st.sampled_from(CONTENTS), max_size=3), label="contents")
        step = Step(f"n{len(rollout.steps)}", parent, contents)
        fails = self.data.draw(st.integers(0, 4), label="fails") == 0
        place = {"parent": parent or ""} if retry_of is None else {"retry_of": retry_of.name}
        times = self.data.draw(st.integers(1, 2), label="times")
        for _ in range(times):
            try:
                with rollout.session.step(id=step.name, **place) as writing:
                    writing.put("token_ids", [len(live)], start=len(live))
                    for content in contents:
                        writing.attach_blob(content, "image/png")
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                return
        rollout.steps.append(step)
        if retry_of is not None:
            rollout.leave_out(retry_of.name)

    def retry(self, rollout: Rollout) -> None:
        live = [step for step in rollout.steps if step.counts]
        if live and rollout.state == "open":
            self.step(rollout, self.data.draw(st.sampled_from(live), label="attempt"))

    def abandon(self, rollout: Rollout) -> None:
        live = [step for step in rollout.steps if step.counts]
        if live and rollout.state == "open":
            name = self.data.draw(st.sampled_from(live), label="abandoned").name
            rollout.session.abandon(name)
            rollout.leave_out(name)

    def abort(self, rollout: Rollout) -> None:
        if rollout.state == "open":
            rollout.session.abort()
            rollout.state = "over"

    def finalize(self, rollout: Rollout) -> None:
        view = self.data.draw(st.sampled_from(list(VIEWS)), label="view")
        untouched = all(tasks == set(TASKS) for some in rollout.owed.values() for tasks in some.values())
        if rollout.state != "over" and view not in rollout.owed and untouched:
            rollout.finalize(view)

    def train(self, rollout: Rollout) -> None:
        view = self.data.draw(st.sampled_from(list(VIEWS)), label="view")
        task = self.data.draw(st.sampled_from(TASKS), label="task")
        where = f"session_id = '{rollout.session.id}'"
        limit = self.data.draw(st.integers(1, 3), label="limit")
        batch = self.run.claim(limit, where=where, task=task, unit="segment", view=view)  # type: ignore[arg-type]
        names = list(batch.segment_ids)
        batch.release()
        if names:
            rollout.finish(view, names, task)

    def discard(self, rollout: Rollout) -> None:
        view = self.data.draw(st.sampled_from(list(VIEWS)), label="view")
        if rollout.state == "finalized" and view in rollout.owed:
            self.run.discard([rollout.session.id], reason="no", view=view)  # type: ignore[arg-type]
            rollout.owed[view] = {name: set() for name in rollout.owed[view]}
            rollout.settle()
        elif rollout.state == "open":
            self.run.discard([rollout.session.id], reason="no")
            rollout.state = "over"

    def check(self) -> None:
        wanted = Counter(blob_id(one) for rollout in self.rollouts for one in rollout.held())
        catalog = self.store._backend._catalog  # type: ignore[attr-defined]
        rows = catalog.changes("blobs", self.run.name, 0)[0].to_pylist()
        assert {row["blob_id"]: row["refs"] for row in rows if row["state"] == "stored"} == wanted
        assert not any(row["refs"] for row in rows if row["state"] != "stored")
        chunks = catalog.changes("chunks", self.run.name, 0)[0].to_pylist()
        live = [row for row in chunks if row["field"] == "_blobs" and row["state"] == "committed"]
        assert sum(row["bytes"] for row in live) == sum(
            len(one) for one in CONTENTS if blob_id(one) in wanted
        )
        for content in CONTENTS:
            if blob_id(content) in wanted:
                assert self.run.blob(blob_id(content)) == content
            else:
                with pytest.raises((errors.NotFound, errors.ChunkReleased)):
                    self.run.blob(blob_id(content))


ACTIONS = ["open", "step", "step", "step", "retry", "abandon", "abort", "finalize", "finalize", "train",
           "train", "discard"]  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_references_are_those_of_the_model(store: Store, data: st.DataObject) -> None:
    model = Model(store, data)
    for _ in range(data.draw(st.integers(1, 14), label="actions")):
        model.act()
        model.check()
    for rollout in model.rollouts:
        model.run.discard([rollout.session.id], reason="over")
        if "timeline" in rollout.owed:
            model.run.discard([rollout.session.id], reason="over", view="timeline")
        rollout.state, rollout.owed = "over", {}
    model.check()
    # Nothing of it is left in the shard: what was refused, retried or a duplicate went as well.
    stored = store._backend._shard  # type: ignore[attr-defined]
    left = [one for one in stored.ids() if stored.header(one).run == model.run.name]
    assert all(stored.header(one).field != "_blobs" for one in left)
