"""Overlay or rewrite: a step is compared with its own path, whatever the session did elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.store.engine import Engine


class Scene:
    """A store that can be closed and opened again, with one session."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.open()

    def open(self) -> None:
        self.store = arrow_tq.open(self._path, capacity_bytes=256 << 20)
        self.run = self.store.run("demo", fields=[fields.token_ids()])
        assert isinstance(self.run.backend, Engine)
        self.engine = self.run.backend

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def write(self, name: str, start: int, tokens: list[int] | None, **place: object) -> int | None:
        """Commit a step; where the store says that it departs from its path."""
        with self.run.session("s").step(id=name, **place) as step:  # type: ignore[arg-type]
            if tokens is not None:
                step.put("token_ids", tokens, start=start)
        # Not by SQL: each store that is opened would start a worker for it.
        rows = self.engine._catalog.changes("steps", "demo", 0)[0].to_pylist()
        return next(row["rewrite_at"] for row in rows if row["step_id"] == name)

    def abandon(self, name: str) -> None:
        self.run.session("s").abandon(name)

    def two_branches(self) -> None:
        """``a`` to 2, then ``long`` to 8 and ``short``, the last one, to 3."""
        assert self.write("a", 0, [1, 2]) is None
        assert self.write("long", 2, [3, 4, 5, 6, 7, 8]) is None
        assert self.write("short", 2, [9], parent="a") is None


@pytest.fixture(params=["warm", "reopened"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """Each rule holds with what the engine remembers, and without."""
    scene = Scene(tmp_path / "store")
    if request.param == "reopened":
        plain = scene.write

        def write(name: str, start: int, tokens: list[int] | None, **place: object) -> int | None:
            scene.reopen()
            return plain(name, start, tokens, **place)

        scene.write = write  # type: ignore[method-assign]
    yield scene
    scene.store.close()


def test_a_branch_is_compared_with_its_parents_path(scene: Scene) -> None:
    scene.two_branches()
    assert scene.write("c", 4, [50, 60], parent="long") == 4
    assert scene.write("d", 4, [5, 6, 7, 8, 9], parent="long") is None
    assert scene.write("e", 3, [40, 50], parent="short") is None


def test_a_replay_does_not_move_the_last_step(scene: Scene) -> None:
    scene.two_branches()
    scene.write("b", 3, [10, 11, 12])
    scene.write("a", 0, [1, 2])
    scene.write("long", 2, [3, 4, 5, 6, 7, 8])
    assert scene.write("c", 4, [50]) == 4


def test_a_replay_from_another_branch_does_not_move_the_last_step(scene: Scene) -> None:
    scene.two_branches()
    scene.write("more", 8, [9], parent="long")
    scene.write("short", 2, [9])
    assert scene.write("c", 4, [50]) == 4


def test_after_an_abandoned_step_the_one_before_is_compared(scene: Scene) -> None:
    scene.two_branches()
    scene.abandon("short")
    assert scene.write("c", 4, [5, 60]) == 5


def test_a_retry_is_compared_with_what_came_before_the_attempt(scene: Scene) -> None:
    scene.two_branches()
    assert scene.write("again", 2, [30, 40], retry_of="long") is None
    assert scene.write("more", 3, [40, 50, 60]) is None
    assert scene.write("other", 1, [7], retry_of="again") == 1


def test_a_retry_far_up_is_compared_with_all_of_its_path(scene: Scene) -> None:
    scene.two_branches()
    scene.write("attempt", 8, [9], parent="long")
    scene.write("shorter", 2, [9], parent="a")
    assert scene.write("again", 4, [50], retry_of="attempt") == 4


def test_a_retry_without_tokens_is_the_last_step_all_the_same(scene: Scene) -> None:
    scene.two_branches()
    scene.write("again", 0, None, retry_of="short")
    assert scene.write("more", 2, [5, 6]) is None
    assert scene.write("then", 2, [7]) == 2


def test_a_retry_without_tokens_goes_on_from_all_of_its_path(scene: Scene) -> None:
    scene.two_branches()
    scene.write("attempt", 0, None, parent="long")
    scene.write("shorter", 2, [9], parent="a")
    scene.write("again", 0, None, retry_of="attempt")
    assert scene.write("more", 4, [50]) == 4


def test_a_tree_of_its_own_rewrites_nothing(scene: Scene) -> None:
    scene.two_branches()
    assert scene.write("root", 0, [7, 7, 7], parent="") is None
    assert scene.write("more", 2, [8]) == 2


def test_what_a_rewrite_dropped_is_not_compared_again(scene: Scene) -> None:
    scene.write("a", 0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert scene.write("b", 2, [30, 40]) == 2
    assert scene.write("c", 3, [40, 51, 61], parent="b") is None
    assert scene.write("d", 3, [40, 52]) == 4
    assert scene.write("e", 7, [8, 9], parent="a") is None


def test_steps_without_tokens_change_nothing(scene: Scene) -> None:
    scene.write("a", 0, [1, 2, 3])
    scene.write("b", 0, None)
    scene.write("c", 0, [])
    assert scene.write("d", 1, [20]) == 1
