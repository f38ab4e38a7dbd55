"""Trees in the catalog: what counts, what is freed when, and which view keeps which chunk."""

from __future__ import annotations

import json
from pathlib import Path

import apsw
import pytest

from arrow_tq.store.catalog.finalize import compose_session, store_segments
from arrow_tq.store.catalog.schema import MIGRATIONS
from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import (
    AbandonStep,
    CloseGroup,
    Discard,
    Done,
    FinalizeSession,
    GetSegments,
    ReleaseClaim,
    SegmentInfo,
    SegmentInfos,
)
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import chunk_ids
from tests.catalog_scenes import Scene


def write(scene: Scene, step_id: str, session_id: str = "s", **place: object) -> list[ChunkId]:
    """A step of four tokens with routing; its chunks."""
    receipts = [scene.receipt("token_ids", 0, 4), scene.receipt("routed_experts", 0, 3)]
    scene.commit(scene.step(session_id, step_id, *receipts, sampled=(0, 4), **place))
    return chunk_ids(receipts)


def abandon(scene: Scene, step_id: str) -> int:
    body = scene.catalog.execute(AbandonStep(run="demo", epoch=0, session_id="s", step_id=step_id)).body
    assert isinstance(body, Done)
    return body.count


def finalize(scene: Scene, view: str, session_id: str = "s") -> list[SegmentInfo]:
    command = FinalizeSession.model_validate(
        {"run": "demo", "epoch": 0, "session_id": session_id, "view": view}
    )
    body = scene.catalog.execute(command).body
    assert isinstance(body, SegmentInfos)
    return body.segments


def release(scene: Scene, **wishes: object) -> list[str]:
    """Claim all that there is and release it; the names."""
    info, names = scene.claim(**wishes)
    scene.catalog.execute(ReleaseClaim(run="demo", claim_id=info.claim_id))
    return names


def status(scene: Scene) -> dict[str, str]:
    return {str(row["step_id"]): str(row["status"]) for row in scene.rows("steps")}


class TestTree:
    def test_a_step_that_was_left_out_frees_its_chunks_at_once(self, scene: Scene) -> None:
        scene.session("s")
        kept = write(scene, "a")
        gone = write(scene, "b") + write(scene, "c")
        revision = scene.catalog.revision()
        assert abandon(scene, "b") == 2
        assert sorted(scene.released) == sorted(gone)
        assert scene.states(gone) == {"released"}
        assert scene.states(kept) == {"committed"}
        changed = scene.catalog.changes("steps", "demo", revision)[0].to_pylist()
        assert {row["step_id"]: row["status"] for row in changed} == {"b": "abandoned", "c": "abandoned"}
        assert scene.session("s").last_step == "a"

    def test_the_last_step_is_the_last_committed_one_that_counts(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a")
        write(scene, "b")
        write(scene, "c", parent="a")
        assert abandon(scene, "c") == 1
        assert scene.session("s").last_step == "b"
        assert abandon(scene, "a") == 2
        assert scene.session("s").last_step is None
        write(scene, "d")
        assert [row["parent_id"] for row in scene.rows("steps") if row["step_id"] == "d"] == [None]
        assert [one.num_tokens for one in finalize(scene, "lineage")] == [4]

    def test_a_session_whose_steps_are_all_abandoned_has_no_segments(self, scene: Scene) -> None:
        scene.session("s")
        chunks = write(scene, "a")
        abandon(scene, "a")
        assert finalize(scene, "lineage") == finalize(scene, "timeline") == []
        assert sorted(scene.released) == sorted(chunks)

    def test_a_retried_step_of_the_session_keeps_its_answer_after_it_was_superseded(
        self, scene: Scene
    ) -> None:
        scene.session("s")
        write(scene, "a")
        step = scene.step("s", "b", scene.receipt())
        scene.commit(step)
        write(scene, "b2", retry_of="b")
        scene.pins.headers.clear()
        assert scene.commit(step).step_index == 1
        assert status(scene) == {"a": "committed", "b": "superseded", "b2": "committed"}

    def test_of_the_retries_of_one_attempt_the_last_counts(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a")
        write(scene, "b2", retry_of="b1")
        write(scene, "b3", retry_of="b1")
        assert status(scene) == {"a": "committed", "b2": "superseded", "b3": "committed"}
        with pytest.raises(errors.Conflict, match="'b1' of session 's' comes late: its retry 'b2'"):
            write(scene, "b1")
        assert scene.session("s").last_step == "b3"

    def test_a_failed_retry_supersedes_nothing(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a")
        stored = scene.receipt()
        scene.commit(scene.step("s", "b", stored))
        # The chunk is attached already: the step fails after it was inserted.
        with pytest.raises(errors.Conflict, match="attached already"):
            scene.commit(scene.step("s", "b2", stored, retry_of="b"))
        assert status(scene) == {"a": "committed", "b": "committed"}
        assert scene.session("s").last_step == "b"
        with pytest.raises(errors.InvalidInput, match="retries itself"):
            scene.commit(scene.step("s", "b2", retry_of="b2"))

    def test_tools_are_those_said_last_on_the_path(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a", tools="x")
        write(scene, "b")
        write(scene, "c", tools="x")
        write(scene, "d", tools="y", parent="b")
        write(scene, "e", parent="d", tools="x")
        write(scene, "f", parent="", tools="z")
        cuts = {str(row["step_id"]): row["cut"] for row in scene.rows("steps")}
        assert cuts == {"a": None, "b": None, "c": None, "d": "tools", "e": "tools", "f": None}

    def test_the_cut_says_tools_where_these_changed_and_tokens_too(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a", tools="x")
        for step_id, place in (("b", {"tools": "y"}), ("c", {"extends": True}), ("d", {})):
            step = scene.step("s", step_id, scene.receipt(), parent="a", **place)
            scene.commit(step, rewrite_at=2)
        rows = {str(row["step_id"]): (row["cut"], row["rewrite_at"]) for row in scene.rows("steps")}
        assert rows == {"a": (None, None), "b": ("tools", 2), "c": ("mismatch", 2), "d": ("rewrite", 2)}

    def test_finalizing_sees_what_was_abandoned_meanwhile(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a")
        write(scene, "b")
        command = FinalizeSession(run="demo", epoch=0, session_id="s")
        catalog = scene.catalog
        with catalog._readers.snapshot() as connection:
            composed = compose_session(connection, catalog._runs.get("demo"), command)
        abandon(scene, "b")
        operation = store_segments(composed, catalog._writer_runs, command)
        with pytest.raises(Exception, match="went on while it was finalized"):
            catalog._run(operation)
        assert scene.rows("segments") == []
        finalize(scene, "lineage")
        assert len(scene.rows("segments")) == 1


class TestViews:
    def test_a_chunk_lives_until_both_views_are_released(self, scene: Scene) -> None:
        scene.session("s")
        chunks = write(scene, "a") + write(scene, "b") + write(scene, "c", parent="a")
        assert [one.segment_id for one in finalize(scene, "lineage")] == ["s~0", "s~1"]
        assert [one.segment_id for one in finalize(scene, "timeline")] == ["s~t0", "s~t1"]
        claims = {
            (task, view): scene.claim(task=task, view=view)[0].claim_id
            for task in ("actor", "critic")
            for view in ("lineage", "timeline")
        }
        for left in (3, 2, 1, 0):
            assert scene.released == []
            _, claim_id = claims.popitem()
            scene.catalog.execute(ReleaseClaim(run="demo", claim_id=claim_id))
            assert len(claims) == left
        assert sorted(scene.released) == sorted(chunks)
        assert {row["status"] for row in scene.rows("segments")} == {"done"}

    def test_a_task_gives_up_the_view_that_it_never_claimed(self, scene: Scene) -> None:
        scene.session("s")
        chunks = write(scene, "a") + write(scene, "b")
        finalize(scene, "lineage")
        finalize(scene, "timeline")
        assert release(scene, task="actor") == ["s~0"]
        # Routing is the actor's alone; the critic may still take token ids from either view.
        assert len(scene.released) == 4
        rows = {str(row["segment_id"]): (row["status"], row["reason"]) for row in scene.rows("segments")}
        assert rows == {"s~0": ("ready", None), "s~t0": ("ready", None)}
        assert release(scene, task="actor", view="timeline") == []
        assert release(scene, task="critic", view="timeline") == ["s~t0"]
        assert sorted(scene.released) == sorted(chunks)
        rows = {str(row["segment_id"]): (row["status"], row["reason"]) for row in scene.rows("segments")}
        assert rows == {"s~0": ("done", "trained in another view"), "s~t0": ("done", None)}

    def test_a_view_is_given_up_only_when_all_of_the_other_is_over(self, scene: Scene) -> None:
        scene.session("s", tasks=["actor"])
        write(scene, "a")
        write(scene, "b", parent="")
        finalize(scene, "lineage")
        finalize(scene, "timeline")
        info, names = scene.claim(1, task="actor", unit="segment")
        scene.catalog.execute(ReleaseClaim(run="demo", claim_id=info.claim_id))
        assert (names, scene.released) == (["s~0"], [])
        # The rest is discarded: then the task has trained what it wanted of the session.
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["s~1"], reason="bad"))
        assert len(scene.released) == 6
        assert scene.catalog.gauges().discarded_by_reason == {"bad": 1}

    def test_discarding_one_view_leaves_the_other(self, scene: Scene) -> None:
        scene.session("s", tasks=["actor"])
        write(scene, "a")
        finalize(scene, "lineage")
        finalize(scene, "timeline")
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["s"], reason="bad"))
        assert scene.released == []
        assert release(scene, task="actor", view="timeline") == ["s~t0"]
        assert len(scene.released) == 3

    def test_nothing_is_freed_twice(self, scene: Scene) -> None:
        scene.session("s", tasks=["actor"])
        scene.session("t", tasks=["actor"])
        for session_id in ("s", "t"):
            write(scene, "a", session_id)
            finalize(scene, "lineage", session_id)
            finalize(scene, "timeline", session_id)
        release(scene, task="actor")
        assert len(scene.released) == len(set(scene.released)) == 6
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["s", "t"], view="timeline", reason="x"))
        assert len(scene.released) == 6
        assert {row["status"] for row in scene.rows("segments")} == {"done"}

    def test_the_other_view_can_be_finalized_after_a_restart(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a")
        finalize(scene, "lineage")
        scene.reopen()
        assert [one.segment_id for one in finalize(scene, "timeline")] == ["s~t0"]
        assert [one.segment_id for one in finalize(scene, "timeline")] == ["s~t0"]
        with pytest.raises(errors.SessionClosed, match="is finalized"):
            write(scene, "b")

    def test_a_view_that_is_not_there_is_named(self, scene: Scene) -> None:
        scene.session("s")
        write(scene, "a")
        finalize(scene, "timeline")
        with pytest.raises(errors.NotFound, match="finalized in another view"):
            scene.table("s")
        command = GetSegments(run="demo", ids=["s"], view="timeline")
        assert len(scene.catalog.execute(command).blobs) == 2

    def test_a_group_waits_for_sessions_that_lack_the_view(self, scene: Scene) -> None:
        for session_id in ("s", "t"):
            scene.session(session_id, group="g", tasks=["actor"])
            write(scene, "a", session_id)
            finalize(scene, "lineage", session_id)
        finalize(scene, "timeline", "s")
        wish = {"task": "actor", "unit": "group", "view": "timeline"}
        assert scene.claim(**wish)[1] == []
        finalize(scene, "timeline", "t")
        assert scene.claim(**wish)[1] == ["s~t0", "t~t0"]

    def test_a_closed_group_does_not_wait_for_a_view(self, scene: Scene) -> None:
        for session_id in ("s", "t"):
            scene.session(session_id, group="g", tasks=["actor"])
            write(scene, "a", session_id)
            finalize(scene, "lineage", session_id)
        finalize(scene, "timeline", "s")
        scene.catalog.execute(CloseGroup(run="demo", epoch=0, group="g"))
        assert scene.claim(task="actor", unit="group", view="timeline")[1] == ["s~t0"]

    def test_stale_groups_are_discarded_in_their_view(self, scene: Scene) -> None:
        scene.session("s", group="g", tasks=["actor"])
        write(scene, "a", version="1")
        write(scene, "b", version="2")
        write(scene, "c", version="3", parent="a")
        finalize(scene, "lineage")
        finalize(scene, "timeline")
        scene.claim(task="actor", max_staleness=0, on_stale="discard_group")
        rows = {str(row["segment_id"]): row["status"] for row in scene.rows("segments")}
        assert rows == {"s~0": "discarded", "s~1": "discarded", "s~t0": "ready", "s~t1": "ready"}

    def test_expiry_frees_both_views(self, scene: Scene) -> None:
        scene.session("s", tasks=[], ttl_s=0.0)
        chunks = write(scene, "a")
        finalize(scene, "lineage")
        finalize(scene, "timeline")
        scene.catalog.maintain()
        assert sorted(scene.released) == sorted(chunks)
        scene.session("t", tasks=[], ttl_s=0.0)
        write(scene, "a", "t")
        finalize(scene, "lineage", "t")
        scene.catalog.maintain()
        with pytest.raises(errors.SessionClosed, match="expired"):
            finalize(scene, "timeline", "t")


def test_a_catalog_of_chains_becomes_one_of_trees(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    connection = apsw.Connection(str(path))
    with connection:
        connection.execute(MIGRATIONS[0])
        connection.execute("PRAGMA user_version = 1")
        connection.execute(
            "INSERT INTO runs VALUES (1, 'demo', 'process', 0, ?, ?, NULL, 0, 1)",
            (json.dumps([{"name": "token_ids", "dtype": "int32"}]), json.dumps([{"name": "actor"}])),
        )
        connection.execute("INSERT INTO task_sets VALUES (1, 1, '[\"actor\"]')")
        connection.execute(
            "INSERT INTO sessions "
            "VALUES (1, 1, 's', NULL, 'open', NULL, 1, 2, 'two', '{}', NULL, 0, 0, NULL, 1)"
        )
        for index, name, parent, rewrite_at in ((0, "one", None, None), (1, "two", "one", 2)):
            connection.execute(
                "INSERT INTO steps VALUES (?, 1, ?, ?, ?, '[]', NULL, NULL, NULL, NULL, ?, ?, 0, 1)",
                (index + 1, index, name, parent, rewrite_at, b"\x01\x00\x00"),
            )
    connection.close()
    scene = Scene(path)
    rows = [(row["step_id"], row["status"], row["cut"]) for row in scene.rows("steps")]
    assert rows == [("one", "committed", None), ("two", "committed", "rewrite")]
    assert scene.session("s").last_step == "two"
    assert [one.finish_reason for one in finalize(scene, "lineage")] == ["rewrite", "end"]
    scene.catalog.close()
