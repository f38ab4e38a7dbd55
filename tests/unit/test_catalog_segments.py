"""Finalizing, reading, updating and discarding segments, and what the change stream says of it."""

from __future__ import annotations

import json
import time

import pytest

from arrow_tq.calls import read_table
from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import (
    AbortSession,
    CommitBundle,
    Discard,
    Done,
    FinalizeSession,
    GetSegments,
    ListSegments,
    Mark,
    UpdateSegments,
)
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.receipts import chunk_ids
from arrow_tq_schemas.tables import TABLES
from tests.catalog_scenes import Scene


def update(scene: Scene, *ids: str, **columns: object) -> int:
    command = UpdateSegments(run="demo", ids=list(ids), columns=json.dumps(columns))
    body = scene.catalog.execute(command).body
    assert isinstance(body, Done)
    return body.count


def discard(scene: Scene, *ids: str, where: str | None = None, reason: str = "bad") -> int:
    command = Discard(run="demo", epoch=0, ids=list(ids) or None, where=where, reason=reason)
    body = scene.catalog.execute(command).body
    assert isinstance(body, Done)
    return body.count


class TestFinalize:
    def test_segments_have_their_row_and_manifest(self, scene: Scene) -> None:
        scene.session("s", group="g", lr=0.5, source="unit")
        receipts = [scene.receipt("token_ids", 0, 6), scene.receipt("routed_experts", 0, 5)]
        scene.commit(scene.step("s", "one", *receipts, version="b", sampled=(2, 6)))
        more = scene.receipt("token_ids", 4, 4)
        scene.commit(scene.step("s", "two", more, version="a", sampled=(6, 8)), rewrite_at=4)
        first, second = scene.finalize("s", reward=1.5, source="late")
        assert (first.segment_id, second.segment_id) == ("s~0", "s~1")
        assert (first.num_tokens, first.finish_reason, second.num_tokens) == (6, "rewrite", 8)
        reply = scene.catalog.execute(GetSegments(run="demo", ids=["s~1", "s"]))
        table = read_table(reply.blobs[0])
        assert table.column("segment_id").to_pylist() == ["s~1", "s~0", "s~1"]
        assert table.schema.names == [*TABLES["segments"].names, "lr", "source"]
        row = table.slice(1, 1).to_pylist()[0]
        assert (row["run"], row["session_id"], row["group_id"], row["status"]) == ("demo", "s", "g", "ready")
        assert (row["reward"], row["lr"], row["source"]) == (1.5, 0.5, "late")
        assert (row["segment_index"], row["segment_count"]) == (0, 2)
        assert (row["version_min"], row["version_max"]) == ("b", "b")
        assert abs(row["created_at"].timestamp() - time.time()) < 60
        manifests = [Manifest.decode(blob) for blob in reply.blobs[1:]]
        assert [manifest.segment_id for manifest in manifests] == ["s~1", "s~0", "s~1"]
        (session,) = scene.rows("sessions")
        assert (session["status"], session["steps"]) == ("finalized", 2)

    def test_again_gives_the_same_or_says_what_differs(self, scene: Scene) -> None:
        scene.fill("s", reward=1.0)
        revision = scene.catalog.revision()
        segments = scene.finalize("s", reward=1.0)
        assert [segment.segment_id for segment in segments] == ["s~0"]
        assert len(scene.rows("segments")) == 1
        with pytest.raises(errors.SessionClosed, match=r"finalized already with reward and columns \(1.0"):
            scene.finalize("s", reward=2.0)
        with pytest.raises(errors.SessionClosed, match="finalized"):
            scene.commit(scene.step("s", "late"))
        assert scene.catalog.changes("segments", None, revision)[0].num_rows == 0

    def test_a_session_without_steps_has_no_segments(self, scene: Scene) -> None:
        scene.session("s")
        assert scene.finalize("s", reward=1.0) == []
        assert scene.table("s").num_rows == 0
        assert update(scene, "s", reward=2.0) == 0
        with pytest.raises(errors.NotFound, match="no session 'x'"):
            scene.finalize("x")

    def test_an_ended_session_cannot_be_finalized(self, scene: Scene) -> None:
        scene.session("s")
        scene.catalog.execute(AbortSession(run="demo", epoch=0, session_id="s", reason="gone"))
        with pytest.raises(errors.SessionClosed, match=r"'s' is aborted \(gone\)"):
            scene.finalize("s")

    @pytest.mark.parametrize("reward", [float("nan"), float("inf")])
    def test_a_reward_is_finite(self, scene: Scene, reward: float) -> None:
        scene.session("s")
        command = FinalizeSession.model_construct(
            **{**FinalizeSession(run="demo", epoch=0, session_id="s").model_dump(), "reward": reward}
        )
        with pytest.raises(errors.InvalidInput, match="expected a finite number"):
            scene.catalog.execute(command)


class TestReading:
    def test_unknown_ids_are_named(self, scene: Scene) -> None:
        scene.fill("s")
        scene.session("open")
        with pytest.raises(errors.NotFound, match="no segment or session 'x'"):
            scene.table("s~0", "x")
        with pytest.raises(errors.NotFound, match="'open' is open: it has no segments in view 'lineage'"):
            scene.table("open")
        assert scene.table().num_rows == 0

    def test_listing_gives_the_newest_last(self, scene: Scene) -> None:
        for index in range(5):
            scene.fill(f"s-{index}", reward=float(index))
        scene.run("other")

        def names(**more: object) -> list[str]:
            reply = scene.catalog.execute(ListSegments.model_validate(more))
            found: list[str] = read_table(reply.blobs[0]).column("session_id").to_pylist()
            return found

        assert names(run="demo") == names() == [f"s-{index}" for index in range(5)]
        assert names(run="demo", limit=2) == ["s-3", "s-4"]
        assert names(run="demo", where="reward < 3", limit=2) == ["s-1", "s-2"]
        assert names(run="other") == names(view="timeline") == []
        with pytest.raises(errors.NotFound, match="'nowhere'"):
            names(run="nowhere")
        with pytest.raises(errors.InvalidQuery, match="nothing"):
            names(where="nothing = 1")


class TestUpdate:
    def test_rewards_and_columns_come_late(self, scene: Scene) -> None:
        scene.fill("s", segments=2, note="a", keep=1)
        scene.fill("t")
        assert update(scene, "s", "t~0", reward=2, note=None, extra={"b": [1, None]}, flag=True) == 3
        table = scene.table("s", "t")
        assert table.column("reward").to_pylist() == [2.0, 2.0, 2.0]
        assert table.column("note").to_pylist() == [None, None, None]
        assert table.column("keep").to_pylist() == [1, 1, None]
        assert table.column("flag").to_pylist() == [True, True, True]
        assert [json.loads(text) for text in table.column("extra").to_pylist()] == [{"b": [1, None]}] * 3
        kinds = {"extra": "json", "flag": "bool", "keep": "int", "note": "text"}
        assert scene.catalog.user_columns("segments", "demo") == kinds
        assert scene.catalog.user_columns("segments", None) == kinds
        assert update(scene, "s~0", reward=None, keep=0.5) == 1
        table = scene.table("s")
        assert table.column("reward").to_pylist() == [None, 2.0]
        assert table.column("keep").to_pylist() == [0.5, 1.0]

    def test_what_is_refused_changes_nothing(self, scene: Scene) -> None:
        scene.fill("s", reward=1.0)
        scene.session("open")
        for ids, columns, kind, message in [
            (["s~0", "x"], {"reward": 2}, errors.NotFound, "'x'"),
            (["s~0", "open"], {"reward": 2}, errors.NotFound, "'open' is open"),
            (["s~0"], {"reward": True}, errors.InvalidInput, "reward True"),
            (["s~0"], {"reward": "high"}, errors.InvalidInput, "reward 'high'"),
            (["s~0"], {"status": "done"}, errors.InvalidInput, "'status': the name is taken"),
            (["s~0"], {"a": "\ud800"}, errors.InvalidInput, "column 'a': a lone surrogate"),
        ]:
            with pytest.raises(kind, match=message):
                update(scene, *ids, **columns)  # type: ignore[arg-type]
        assert scene.table("s~0").column("reward").to_pylist() == [1.0]

    def test_integers_beyond_64_bits_are_kept_as_json(self, scene: Scene) -> None:
        scene.fill("s")
        update(scene, "s", big=1 << 70)
        assert scene.table("s").column("big").to_pylist() == [str(1 << 70)]


class TestDiscard:
    def test_the_row_stays_and_the_chunks_go(self, scene: Scene) -> None:
        ids = scene.fill("s", reward=0.0)
        kept = scene.fill("t", reward=1.0)
        assert discard(scene, where="reward < 0.5", reason="filtered") == 1
        assert sorted(scene.released) == sorted(ids)
        assert (scene.states(ids), scene.states(kept)) == ({"released"}, {"committed"})
        (row,) = scene.table("s~0").to_pylist()
        assert (row["status"], row["reason"]) == ("discarded", "filtered")
        with pytest.raises(errors.ChunkReleased, match="'s~0' is discarded: filtered"):
            scene.catalog.execute(GetSegments(run="demo", ids=["s"]))
        assert discard(scene, "s", reason="again") == 0
        assert scene.catalog.gauges().discarded_by_reason == {"filtered": 1}
        assert scene.claim(task="actor")[1] == ["t~0"]

    def test_a_chunk_of_another_segment_stays(self, scene: Scene) -> None:
        scene.session("s")
        first, second = scene.receipt("token_ids", 0, 6), scene.receipt("token_ids", 4, 4)
        scene.commit(scene.step("s", "one", first))
        scene.commit(scene.step("s", "two", second), rewrite_at=4)
        scene.finalize("s")
        assert discard(scene, "s~0") == 1
        assert scene.released == []
        assert discard(scene, "s~1") == 1
        assert sorted(scene.released) == sorted(chunk_ids([first, second]))

    def test_an_open_session_is_ended(self, scene: Scene) -> None:
        scene.session("s")
        receipt = scene.receipt("routed_experts", 0, 3)
        scene.commit(scene.step("s", "one", receipt))
        assert discard(scene, "s", reason="over-sampled") == 1
        assert sorted(scene.released) == sorted(chunk_ids([receipt]))
        (row,) = scene.rows("sessions")
        assert (row["status"], row["reason"]) == ("discarded", "over-sampled")
        assert discard(scene, "s") == 0

    def test_one_of_ids_and_where(self, scene: Scene) -> None:
        for ids, where in [(None, None), (["s"], "reward > 1")]:
            with pytest.raises(errors.InvalidInput, match="ids or where"):
                scene.catalog.execute(Discard(run="demo", epoch=0, ids=ids, where=where, reason="x"))
        with pytest.raises(errors.NotFound, match="'x'"):
            discard(scene, "x")

    def test_what_was_trained_stays_done(self, scene: Scene) -> None:
        from arrow_tq_schemas.commands import ReleaseClaim

        scene.fill("s")
        for task in ("actor", "critic"):
            info, _ = scene.claim(task=task)
            scene.catalog.execute(ReleaseClaim(run="demo", claim_id=info.claim_id))
        assert discard(scene, "s") == 0
        assert scene.table("s").column("status").to_pylist() == ["done"]
        with pytest.raises(errors.ChunkReleased, match="done for every task"):
            scene.catalog.execute(GetSegments(run="demo", ids=["s"]))


class TestExpiry:
    def test_an_unfinished_session_expires(self, scene: Scene) -> None:
        scene.session("s", ttl_s=0.05)
        receipt = scene.receipt()
        scene.commit(scene.step("s", "one", receipt))
        scene.session("t", ttl_s=60)
        scene.catalog.maintain()
        time.sleep(0.1)
        scene.catalog.maintain()
        rows = {row["session_id"]: row for row in scene.rows("sessions")}
        assert (rows["s"]["status"], rows["s"]["reason"], rows["t"]["status"]) == ("expired", "ttl", "open")
        assert scene.released == chunk_ids([receipt])
        with pytest.raises(errors.SessionClosed, match="expired"):
            scene.finalize("s")

    def test_a_finished_session_expires_only_without_tasks(self, scene: Scene) -> None:
        ids = scene.fill("eval", tasks=[], ttl_s=0.05)
        kept = scene.fill("train", ttl_s=0.05)
        assert scene.claim(task="actor", limit=9)[1] == ["train~0"]
        assert scene.states(ids) == {"committed"}
        assert scene.catalog.execute(GetSegments(run="demo", ids=["eval"])).blobs
        time.sleep(0.1)
        scene.catalog.maintain()
        assert (scene.states(ids), scene.states(kept)) == ({"released"}, {"committed"})
        (row,) = scene.table("eval").to_pylist()
        assert (row["status"], row["reason"]) == ("discarded", "expired")

    def test_a_quiet_store_makes_no_transactions(self, scene: Scene) -> None:
        scene.fill("s")
        revision = scene.catalog.revision()
        scene.catalog.maintain()
        assert scene.catalog.revision() == revision


class TestChanges:
    def test_each_change_is_seen_once(self, scene: Scene) -> None:
        scene.catalog.execute(Mark(run="demo", epoch=0, name="m"))
        scene.fill("s", reward=0.5, note="x")
        scene.session("seen")
        scene.commit(scene.step("seen", "one", blobs=[scene.blob(b"png")]))
        scene.claim(task="actor")
        bundle_id = scene.receipt().chunks[0].id
        scene.catalog.execute(
            CommitBundle(run="demo", epoch=0, bundle_id=bundle_id, chunks=1, rows=1, bytes=4, fields=["x"])
        )
        seen = {}
        for table, schema in TABLES.items():
            rows, seen[table] = scene.catalog.changes(table, "demo", 0)
            assert rows.schema.names == [*schema.names, "columns", "rev", "key"], table
            assert rows.num_rows > 0, table
            assert rows.schema.field(0).type == schema.field(0).type
            keys = rows.column("key").to_pylist()
            assert len(set(keys)) == len(keys)
            assert scene.catalog.changes(table, "demo", seen[table])[0].num_rows == 0
            assert scene.catalog.changes(table, "nowhere", 0)[0].num_rows == 0
        update(scene, "s", note="y")
        changed = [table for table in TABLES if scene.catalog.changes(table, None, seen[table])[0].num_rows]
        assert changed == ["segments"]
        (row,) = scene.catalog.changes("segments", None, seen["segments"])[0].to_pylist()
        assert json.loads(row["columns"]) == {"note": "y"}
        assert row["rev"] == scene.catalog.revision()
        with pytest.raises(errors.InvalidInput, match="table 'secrets'"):
            scene.catalog.changes("secrets", None, 0)

    def test_spans_are_those_of_the_manifest(self, scene: Scene) -> None:
        ids = scene.fill("s")
        rows = scene.rows("spans")
        assert {row["field"] for row in rows} == {"token_ids", "routed_experts"}
        assert {row["chunk_id"] for row in rows} == {one.hex for one in ids if one.group == 0}
        assert [(row["start"], row["rows"], row["first_row"]) for row in rows] == [(0, 4, 0), (0, 3, 0)]
        assert {row["segment_id"] for row in rows} == {"s~0"}

    def test_released_chunks_are_changes(self, scene: Scene) -> None:
        scene.fill("s")
        revision = scene.catalog.revision()
        discard(scene, "s")
        rows = scene.catalog.changes("chunks", None, revision)[0].to_pylist()
        assert {row["state"] for row in rows} == {"released"}
        assert len(rows) == 3

    def test_gauges(self, scene: Scene) -> None:
        scene.fill("s")
        scene.fill("eval", tasks=[])
        scene.session("open")
        gauges = scene.catalog.gauges()
        assert (gauges.open_sessions, gauges.unclaimed_segments, gauges.waiters) == (1, 1, 0)
        assert 0 <= gauges.oldest_unclaimed_s < 60
        assert gauges.commits == 2
