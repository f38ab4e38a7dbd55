"""Marks and rewinds: what is kept, for how long, and what is claimable again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arrow_tq.store.catalog import keeping, kept
from arrow_tq.store.catalog.keeping import Keeping
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import (
    AttachClaim,
    Claim,
    ClaimInfo,
    CloseGroup,
    Discard,
    FinalizeSession,
    GetSegments,
    Mark,
    MarkInfo,
    ReleaseClaim,
    RenewClaim,
    Rewind,
    Rewound,
    SetPolicyVersion,
    TaskSpec,
)
from tests.catalog_scenes import Scene


def mark(scene: Scene, name: str, epoch: int = 0) -> MarkInfo:
    body = scene.catalog.execute(Mark(run="demo", epoch=epoch, name=name)).body
    assert isinstance(body, MarkInfo)
    return body


def rewind(scene: Scene, name: str, epoch: int = 0) -> Rewound:
    body = scene.catalog.execute(Rewind(run="demo", epoch=epoch, name=name)).body
    assert isinstance(body, Rewound)
    return body


def release(scene: Scene, info: ClaimInfo) -> None:
    scene.catalog.execute(ReleaseClaim(run="demo", claim_id=info.claim_id))


def train(scene: Scene, *tasks: str) -> None:
    """Claim and release whatever is ready, for each task."""
    for task in tasks:
        release(scene, scene.claim(task=task)[0])


def marks(scene: Scene) -> dict[object, tuple[object, object]]:
    """Status and kept pairs by name; the last of a name counts."""
    return {row["mark"]: (row["status"], row["kept_segments"]) for row in scene.rows("marks")}


def row_key(row: dict[str, object]) -> int:
    return int(str(row["key"]))


def statuses(scene: Scene) -> dict[object, object]:
    return {row["segment_id"]: row["status"] for row in scene.rows("segments")}


class TestMarks:
    def test_a_run_without_marks_keeps_nothing(self, scene: Scene) -> None:
        ids = scene.fill("a")
        train(scene, "actor", "critic")
        assert sorted(scene.released) == sorted(ids)
        with pytest.raises(errors.NotFound, match="no mark 'x'; no mark of it is left") as caught:
            rewind(scene, "x")
        assert caught.value.details == {"mark": "x", "live": []}

    def test_what_is_released_since_is_kept_and_the_next_mark_frees_it(self, scene: Scene) -> None:
        before = scene.fill("before")
        train(scene, "actor", "critic")
        assert mark(scene, "one") == MarkInfo(run="demo", name="one", epoch=0)
        since = scene.fill("since")
        train(scene, "actor", "critic")
        assert statuses(scene) == {"before~0": "done", "since~0": "done"}
        assert sorted(scene.released) == sorted(before)
        assert scene.states(since) == {"committed"}
        assert marks(scene) == {"one": ("live", 2)}
        assert mark(scene, "one").freed == 0, "again: the same mark"
        assert mark(scene, "two").freed == 2
        assert sorted(scene.released) == sorted(before + since)
        assert marks(scene) == {"one": ("spent", 0), "two": ("live", 0)}
        with pytest.raises(
            errors.MarkSpent, match=r"'one' is not kept any more: mark two came after"
        ) as caught:
            rewind(scene, "one")
        assert caught.value.details["live"] == ["two"]
        assert mark(scene, "one").status == "spent", "an old name names the old mark"

    def test_an_empty_claim_is_nothing_to_keep(self, scene: Scene) -> None:
        mark(scene, "one")
        train(scene, "actor")
        assert marks(scene) == {"one": ("live", 0)}
        assert rewind(scene, "one").segments == []

    @pytest.mark.parametrize("keep_marks", [0, 1, 2, 3])
    def test_how_many_marks_back(self, tmp_path: Path, keep_marks: int) -> None:
        scene = Scene(tmp_path / "some.sqlite", keep_marks=keep_marks)
        scene.run(tasks=[TaskSpec(name="actor")])
        for index in range(3):
            mark(scene, f"m{index}")
            scene.fill(f"s{index}")
            train(scene, "actor")
        live = [name for name, (status, _) in marks(scene).items() if status == "live"]
        assert live == [f"m{index}" for index in range(3 - keep_marks, 3)]
        if live:
            assert rewind(scene, live[0]).segments == [f"s{index}~0" for index in range(3 - keep_marks, 3)]
        else:
            with pytest.raises(errors.MarkSpent, match="keep_marks = 0"):
                rewind(scene, "m2")
        scene.catalog.close()

    def test_age_and_room_end_the_keeping(self, scene: Scene) -> None:
        ids = scene.fill("a")
        mark(scene, "one")
        train(scene, "actor", "critic")
        scene.reopen(keep_released_s=0.05)
        time.sleep(0.1)
        scene.catalog.maintain()
        assert sorted(scene.released) == sorted(ids)
        with pytest.raises(errors.MarkSpent, match="longer than keep_released_s"):
            rewind(scene, "one")
        scene.reopen()
        mark(scene, "two")
        more = scene.fill("b")
        train(scene, "actor", "critic")
        assert scene.catalog.keeping.give_up_oldest() == ("two", 2)
        assert scene.catalog.keeping.give_up_oldest() is None
        assert sorted(scene.released) == sorted(ids + more)
        with pytest.raises(errors.MarkSpent, match="its room was needed"):
            rewind(scene, "two")
        scene.fill("c")
        train(scene, "actor", "critic")
        assert marks(scene)["two"] == ("spent", 0), "nobody can go back to it: nothing more is kept"

    def test_a_crash_before_the_pieces_are_freed(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kept, "FREED_MAX", 2)
        monkeypatch.setattr(keeping, "FREED_MAX", 2)
        mark(scene, "one")
        ids = [one for index in range(5) for one in scene.fill(f"s-{index}")]
        train(scene, "actor", "critic")
        pieces: list[int] = []

        def counted(change: Change) -> int:
            pieces.append(kept.free_spent(change))
            return pieces[-1]

        monkeypatch.setattr(keeping, "free_spent", counted)
        with monkeypatch.context() as crashing:
            crashing.setattr(Keeping, "free_spent", lambda self: None)
            assert mark(scene, "two").freed == 10
        assert scene.states(ids) == {"committed"}
        with pytest.raises(errors.MarkSpent):
            rewind(scene, "one")
        scene.reopen()
        assert scene.catalog.keeping.give_up_oldest() is None, "what is spent is not spent again"
        assert sorted(scene.released) == sorted(ids)
        assert pieces == [2, 2, 2, 2, 2, 0]
        monkeypatch.setattr(keeping, "PIECES_MAX", 1)
        scene.fill("a")
        scene.fill("b")
        mark(scene, "three")
        train(scene, "actor", "critic")
        mark(scene, "four")
        for left in (1, 0):
            assert len(scene.pins.headers) - len(scene.released) == 3 * left, "a piece is a session here"
            scene.catalog.maintain()

    def test_other_runs_are_left_alone(self, scene: Scene) -> None:
        scene.run("other")
        with pytest.raises(errors.NotFound):
            scene.catalog.execute(Rewind(run="other", epoch=0, name="one"))
        mark(scene, "one")
        scene.catalog.execute(Mark(run="other", epoch=0, name="one"))
        rewind(scene, "one")
        assert scene.catalog.run_info("other").epoch == 0


class TestRewind:
    def test_segments_are_claimable_again_and_ids_are_new(self, scene: Scene) -> None:
        old = scene.fill("old")
        train(scene, "actor", "critic")
        mark(scene, "one")
        ids = scene.fill("a", segments=2) + scene.fill("b")
        train(scene, "actor")
        under_way, names = scene.claim(task="critic")
        assert names == ["a~0", "a~1", "b~0"]
        rewound = rewind(scene, "one")
        assert (rewound.epoch, rewound.segments, rewound.sessions) == (1, names, [])
        assert scene.states(ids) == {"committed"}
        assert scene.states(old) == {"released"}
        assert statuses(scene) == {"old~0": "done", "a~0": "ready", "a~1": "ready", "b~0": "ready"}
        for task in ("actor", "critic"):
            again, same = scene.claim(task=task, epoch=1)
            assert same == names
            assert again.claim_id != under_way.claim_id
            scene.catalog.execute(GetSegments(run="demo", ids=names))
            release(scene, again)
        assert marks(scene) == {"one": ("live", 6)}, "rewinding again is possible"
        assert rewind(scene, "one", epoch=1).segments == names
        states = {row["state"] for row in scene.rows("claims")}
        assert states == {"done", "rewound"}

    def test_old_claimers_and_writers_are_fenced(self, scene: Scene) -> None:
        mark(scene, "one")
        scene.fill("a")
        done, _ = scene.claim(task="actor")
        release(scene, done)
        under_way, _ = scene.claim(task="critic")
        rewind(scene, "one")
        for command in (
            ReleaseClaim(run="demo", claim_id=under_way.claim_id),
            ReleaseClaim(run="demo", claim_id=done.claim_id),
            RenewClaim(run="demo", claim_id=under_way.claim_id),
            AttachClaim(run="demo", claim_id=done.claim_id, rank=0, world=1),
            Claim(run="demo", limit=1, task="actor", like=done.claim_id),
        ):
            with pytest.raises(errors.ClaimGone, match="rewound"):
                scene.catalog.execute(command)
        for stale in (
            Claim(run="demo", limit=1, task="actor", epoch=0),
            CloseGroup(run="demo", epoch=0, group="g"),
            Mark(run="demo", epoch=0, name="two"),
            Rewind(run="demo", epoch=0, name="one"),
        ):
            with pytest.raises(errors.StaleEpoch):
                scene.catalog.execute(stale)
        with pytest.raises(errors.StaleEpoch):
            scene.session("new")
        again, _ = scene.claim(task="actor")
        with pytest.raises(errors.StaleEpoch):
            scene.catalog.execute(AttachClaim(run="demo", claim_id=again.claim_id, rank=0, world=1, epoch=0))

    def test_a_retried_rewind_is_answered_and_not_repeated(self, scene: Scene) -> None:
        mark(scene, "one")
        scene.fill("a")
        train(scene, "actor")
        command = Rewind(run="demo", epoch=0, name="one")
        first = scene.catalog.execute(command).body
        assert scene.catalog.execute(command).body == first
        assert scene.catalog.run_info("demo").epoch == 1

    def test_sessions_in_flight_end_and_are_named(self, scene: Scene) -> None:
        scene.session("gone before", group="g")
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["gone before"], reason="slow"))
        mark(scene, "one")
        scene.session("in flight", group="g")
        result = scene.commit(scene.step("in flight", "1", receipt := scene.receipt()))
        assert result.step_index == 0
        scene.fill("bad")
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["bad"], reason="filtered"))
        scene.fill("kept")
        rewound = rewind(scene, "one")
        assert [(one.session_id, one.group, one.reason) for one in rewound.sessions] == [
            ("bad", None, "filtered"),
            ("in flight", "g", "rewound"),
        ]
        assert scene.states([chunk.chunk_id for chunk in receipt.chunks]) == {"released"}
        with pytest.raises(errors.SessionClosed, match="rewound"):
            scene.session("in flight", epoch=1)
        assert scene.claim(task="actor")[1] == ["kept~0"]

    def test_policy_version_and_staleness_go_back(self, scene: Scene) -> None:
        scene.catalog.execute(SetPolicyVersion(run="demo", epoch=0, version="1"))
        mark(scene, "one")
        scene.fill("a", version="1")
        for version in ("2", "3"):
            scene.catalog.execute(SetPolicyVersion(run="demo", epoch=0, version=version))
        assert scene.claim(task="actor", max_staleness=1)[1] == []
        assert rewind(scene, "one").policy_version == "1"
        assert scene.catalog.run_info("demo").policy_version == "1"
        assert scene.claim(task="actor", max_staleness=0)[1] == ["a~0"]

    def test_names_after_the_mark_are_free_again(self, scene: Scene) -> None:
        scene.reopen(keep_marks=2)
        mark(scene, "one")
        mark(scene, "two")
        rewind(scene, "one")
        assert marks(scene) == {"one": ("live", 0), "two": ("rewound", 0)}
        with pytest.raises(errors.NotFound, match=r"no mark 'two'; it can be rewound to 'one'"):
            rewind(scene, "two", epoch=1)
        assert mark(scene, "two", epoch=1).epoch == 1
        assert [(row["mark"], row["status"]) for row in sorted(scene.rows("marks"), key=row_key)] == [
            ("one", "live"),
            ("two", "rewound"),
            ("two", "live"),
        ]

    def test_what_was_discarded_stays_so(self, scene: Scene) -> None:
        mark(scene, "one")
        ids = scene.fill("a", segments=2)
        train(scene, "actor")
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["a~0"], reason="bad"))
        assert marks(scene) == {"one": ("live", 1)}
        assert scene.states(ids[:1]) == {"released"}
        rewound = rewind(scene, "one")
        assert rewound.segments == ["a~1"]
        assert statuses(scene) == {"a~0": "discarded", "a~1": "ready"}

    def test_a_view_that_was_given_up_comes_back(self, scene: Scene) -> None:
        mark(scene, "one")
        scene.fill("a")
        scene.catalog.execute(FinalizeSession(run="demo", epoch=0, session_id="a", view="timeline"))
        train(scene, "actor", "critic")
        assert statuses(scene) == {"a~0": "done", "a~t0": "done"}
        assert sorted(rewind(scene, "one").segments) == ["a~0", "a~t0"]
        assert scene.claim(task="actor", view="timeline")[1] == ["a~t0"]

    def test_all_of_it_outlives_a_restart(self, scene: Scene) -> None:
        mark(scene, "one")
        ids = scene.fill("a")
        train(scene, "actor", "critic")
        scene.reopen()
        assert scene.states(ids) == {"committed"}
        assert rewind(scene, "one").segments == ["a~0"]
        scene.reopen()
        assert scene.claim(task="actor", epoch=1)[1] == ["a~0"]
        with pytest.raises(errors.StaleEpoch):
            scene.claim(task="critic", epoch=0)

    def test_a_waiting_claim_of_before_ends_and_one_of_now_is_woken(self, scene: Scene) -> None:
        mark(scene, "one")
        scene.fill("a")
        train(scene, "actor")
        with ThreadPoolExecutor(2) as pool:
            old = pool.submit(scene.claim, 1, task="actor", wait_s=30, epoch=0)
            new = pool.submit(scene.claim, 1, task="actor", wait_s=30)
            until = time.monotonic() + 10
            while scene.catalog._waiters.waiting < 2:
                assert time.monotonic() < until
                time.sleep(0.005)
            rewind(scene, "one")
            with pytest.raises(errors.StaleEpoch):
                old.result(10)
            assert new.result(10)[1] == ["a~0"]
