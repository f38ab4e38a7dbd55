"""Any order of training, marking, discarding, restarting and rewinding, against a model in Python."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import (
    ClaimInfo,
    Discard,
    FinalizeSession,
    Mark,
    ReleaseClaim,
    Rewind,
    Rewound,
    TaskSpec,
)
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import chunk_ids
from tests.catalog_scenes import Scene

TASKS = ("actor", "critic")
MARKS = ("m0", "m1", "m2")
ACTIONS = st.one_of(
    st.tuples(st.just("fill"), st.just("")),
    *(st.tuples(st.just(kind), st.sampled_from(TASKS)) for kind in ("claim", "release", "train")),
    st.tuples(st.just("mark"), st.sampled_from(MARKS)),
    st.tuples(st.just("rewind"), st.sampled_from(MARKS)),
    st.tuples(st.just("discard"), st.just("")),
    st.tuples(st.just("restart"), st.just("")),
)


@dataclass
class Model:
    """What the catalog should hold, with one mark back kept."""

    ready: dict[str, set[str]] = field(default_factory=lambda: {task: set() for task in TASKS})
    claimed: dict[str, set[str]] = field(default_factory=lambda: {task: set() for task in TASKS})
    kept: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of segment and task released since the live mark."""
    live: str | None = None
    spent: set[str] = field(default_factory=set)
    discarded: set[str] = field(default_factory=set)
    epoch: int = 0

    def held(self, name: str, task: str) -> bool:
        return name in self.ready[task] | self.claimed[task] or (name, task) in self.kept

    def release(self, task: str) -> None:
        if self.live is not None:
            self.kept |= {(name, task) for name in self.claimed[task]}
        self.claimed[task].clear()

    def mark(self, name: str) -> None:
        if name == self.live or name in self.spent:
            return
        if self.live is not None:
            self.spent.add(self.live)
        self.live = name
        self.kept.clear()

    def rewind(self) -> set[str]:
        again = {name for name, _ in self.kept}.union(*self.claimed.values())
        for task in TASKS:
            self.ready[task] |= self.claimed[task] | {name for name, kept in self.kept if kept == task}
            self.claimed[task].clear()
        self.kept.clear()
        self.epoch += 1
        return again

    def discard(self, name: str) -> None:
        self.discarded.add(name)
        for task in TASKS:
            self.ready[task].discard(name)
            self.claimed[task].discard(name)
        self.kept = {pair for pair in self.kept if pair[0] != name}


@contextmanager
def scenes() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder) / "catalog.sqlite")
        scene.run(tasks=[TaskSpec(name="actor"), TaskSpec(name="critic", fields=["token_ids"])])
        try:
            yield scene
        finally:
            scene.catalog.close()


@settings(max_examples=25, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=4, max_size=16))
def test_what_is_held_is_what_can_be_trained_again(actions: list[tuple[str, str]]) -> None:
    with scenes() as scene:
        model = Model()
        chunks: dict[str, list[ChunkId]] = {}
        claims: dict[str, list[ClaimInfo]] = {task: [] for task in TASKS}
        for kind, what in [("fill", ""), *actions]:
            apply(scene, model, chunks, claims, kind, what)
        check(scene, model, chunks)


def apply(
    scene: Scene,
    model: Model,
    chunks: dict[str, list[ChunkId]],
    claims: dict[str, list[ClaimInfo]],
    kind: str,
    what: str,
) -> None:
    if kind == "fill":
        name = f"s{len(chunks)}"
        chunks[f"{name}~0"] = fill(scene, name, model.epoch)
        for task in TASKS:
            model.ready[task].add(f"{name}~0")
    elif kind in ("claim", "train"):
        info, names = scene.claim(task=what, epoch=model.epoch)
        assert set(names) == model.ready[what]
        model.claimed[what] |= model.ready[what]
        model.ready[what].clear()
        claims[what].append(info)
    if kind in ("release", "train"):
        for info in claims[what]:
            scene.catalog.execute(ReleaseClaim(run="demo", claim_id=info.claim_id))
        claims[what].clear()
        model.release(what)
    elif kind == "mark":
        scene.catalog.execute(Mark(run="demo", epoch=model.epoch, name=what))
        model.mark(what)
    elif kind == "rewind":
        command = Rewind(run="demo", epoch=model.epoch, name=what)
        if what != model.live:
            with pytest.raises(errors.MarkSpent if what in model.spent else errors.NotFound):
                scene.catalog.execute(command)
            return
        body = scene.catalog.execute(command).body
        assert isinstance(body, Rewound)
        assert set(body.segments) == model.rewind()
        assert body.epoch == model.epoch
        for task in TASKS:
            claims[task].clear()
    elif kind == "discard":
        untrained = sorted(set(chunks) - model.discarded)[-1:]
        done = [
            name for name in untrained if not any(name in model.ready[t] | model.claimed[t] for t in TASKS)
        ]
        for name in set(untrained) - set(done):
            scene.catalog.execute(Discard(run="demo", epoch=model.epoch, ids=[name], reason="bad"))
            model.discard(name)
    elif kind == "restart":
        scene.reopen()


def fill(scene: Scene, name: str, epoch: int) -> list[ChunkId]:
    """A finalized session of one segment; its chunks, of both layer groups."""
    scene.session(name, epoch=epoch)
    receipts = [
        scene.receipt("token_ids", 0, 4, epoch=epoch),
        scene.receipt("routed_experts", 0, 3, epoch=epoch),
    ]
    scene.commit(scene.step(name, "step-0", *receipts, epoch=epoch, sampled=(1, 4)))
    command = FinalizeSession(run="demo", epoch=epoch, session_id=name)
    scene.catalog.execute(command)
    return chunk_ids(receipts)


def check(scene: Scene, model: Model, chunks: dict[str, list[ChunkId]]) -> None:
    """A chunk is there exactly as long as somebody who reads its field may still train its segment."""
    for name, ids in chunks.items():
        for chunk_id, state in zip(ids, scene.catalog.chunk_states(ids), strict=True):
            readers = TASKS if scene.pins.headers[chunk_id].field == "token_ids" else ("actor",)
            held = any(model.held(name, task) for task in readers)
            assert state == ("committed" if held else "released"), (name, chunk_id)
    kept = {row["mark"]: row["kept_segments"] for row in scene.rows("marks") if row["status"] == "live"}
    assert kept == ({} if model.live is None else {model.live: len(model.kept)})
    for task in TASKS:
        assert set(scene.claim(task=task)[1]) == model.ready[task]
