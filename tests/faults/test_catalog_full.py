"""A transaction that fails as a whole: callers are told, pins are taken back, and it goes on after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import StepCommit
from arrow_tq_schemas.receipts import chunk_ids
from tests.catalog_scenes import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "catalog.sqlite")
    scene.run()
    for name in ("a", "b"):
        scene.session(name)
    yield scene
    scene.catalog.close()


def big_step(scene: Scene, session: str) -> StepCommit:
    messages = f'["{"x" * 1_000_000}"]'
    return scene.step(session, "big", scene.receipt(), version="9", messages=messages)


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(scene: Scene) -> None:
    writer: apsw.Connection = scene.catalog._writer._connection
    pages = int(writer.pragma("page_count"))
    revision = scene.catalog.revision()
    writer.pragma("max_page_count", pages + 4)
    small, big = scene.step("a", "one", scene.receipt()), big_step(scene, "b")
    results = scene.catalog.commit_steps([small, big], {})
    assert "store-full" in {result.error["code"] for result in results if result.error is not None}
    with pytest.raises(errors.StoreFull, match="the catalog's disk is full"):
        scene.commit(big)
    assert scene.pins.pinned.isdisjoint(chunk_ids(big.receipts))
    kept = [row["step_id"] for row in scene.rows("steps")]
    acked = [result.step_id for result in results if result.error is None]
    assert kept == acked, "what was acked is there, and nothing else"
    assert len(scene.pins.pinned) == len(scene.rows("chunks")) == len(acked)
    writer.pragma("max_page_count", 1 << 30)
    assert scene.commit(big).step_index == 0
    assert scene.commit(small).step_index == 0
    assert scene.catalog.revision() > revision
    assert {row["version"] for row in scene.rows("steps")} == {None, "9"}


def test_a_commit_that_fails_fails_every_operation(scene: Scene) -> None:
    writer: apsw.Connection = scene.catalog._writer._connection
    writer.set_commit_hook(lambda: True)  # SQLite turns the commit into a rollback.
    steps = [scene.step(name, "one", scene.receipt(), version="1") for name in ("a", "b")]
    revision = scene.catalog.revision()
    results = scene.catalog.commit_steps(steps, {})
    assert [result.error is not None and result.error["code"] for result in results] == ["internal"] * 2
    assert scene.pins.pinned == set()
    assert scene.rows("steps") == scene.rows("chunks") == []
    assert scene.catalog.revision() == revision
    writer.set_commit_hook(None)
    assert [result.error for result in scene.catalog.commit_steps(steps, {})] == [None, None]
    assert len(scene.pins.pinned) == 2


def test_a_fault_in_one_operation_is_not_the_end_of_the_writer(scene: Scene) -> None:
    def broken(change: object) -> int:
        raise ZeroDivisionError("inside")

    def written_then_broken(change: object) -> int:
        change.execute("UPDATE sessions SET status = 'lost'")  # type: ignore[attr-defined]
        raise ZeroDivisionError("inside")

    def fine(change: object) -> int:
        change.execute("UPDATE sessions SET reason = 'x' WHERE session_id = 'a'")  # type: ignore[attr-defined]
        return 7

    outcomes = scene.catalog._writer.run([fine, broken, written_then_broken, fine])
    assert [outcome.value for outcome in outcomes] == [7, None, None, 7]
    for outcome in outcomes[1:3]:
        with pytest.raises(errors.InternalError, match="ZeroDivisionError: inside"):
            assert outcome.error is not None
            raise outcome.error
    assert {row["status"] for row in scene.rows("sessions")} == {"open"}
    assert scene.commit(scene.step("a", "one")).step_index == 0
