"""Claims: which segments, whose, for how long, and what is freed when they are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import pytest

from arrow_tq.store.catalog import claiming, selection
from arrow_tq.store.catalog.selection import choose
from arrow_tq_schemas import errors
from arrow_tq_schemas.commands import (
    AttachClaim,
    Claim,
    ClaimInfo,
    CloseGroup,
    Discard,
    Done,
    GetSegments,
    ReleaseClaim,
    RenewClaim,
    SetPolicyVersion,
    UpdateSegments,
)
from tests.catalog_scenes import Scene


def release(scene: Scene, info: ClaimInfo, rank: int | None = None, world: int | None = None) -> int:
    command = ReleaseClaim(run="demo", claim_id=info.claim_id, rank=rank, world=world)
    body = scene.catalog.execute(command).body
    assert isinstance(body, Done)
    return body.count


def attach(scene: Scene, info: ClaimInfo, rank: int, world: int) -> bytes:
    reply = scene.catalog.execute(AttachClaim(run="demo", claim_id=info.claim_id, rank=rank, world=world))
    assert reply.body == info
    return reply.blobs[0]


def statuses(scene: Scene) -> dict[object, object]:
    return {row["segment_id"]: row["status"] for row in scene.rows("segments")}


def end_leases_in(scene: Scene, seconds: float) -> None:
    """Move the end of every lease, as time would."""
    at_us = int((time.time() + seconds) * 1e6)
    scene.catalog._writer.run([lambda change: change.execute("UPDATE claims SET expires_at = ?", (at_us,))])


class TestChoosing:
    def test_in_order_and_once_a_task(self, scene: Scene) -> None:
        for name in ("a", "b", "c"):
            scene.fill(name)
        assert scene.claim(2, task="actor")[1] == ["a~0", "b~0"]
        assert scene.claim(2, task="actor")[1] == ["c~0"]
        assert scene.claim(2, task="actor")[1] == []
        assert scene.claim(9, task="critic")[1] == ["a~0", "b~0", "c~0"]
        with pytest.raises(errors.InvalidInput, match="names no task; run 'demo' declares actor, critic"):
            scene.claim()
        with pytest.raises(errors.InvalidInput, match="names task 'x'"):
            scene.claim(task="x")

    def test_a_session_for_one_task_is_not_for_another(self, scene: Scene) -> None:
        scene.fill("a", tasks=["critic"])
        assert scene.claim(task="actor")[1] == []
        assert scene.claim(task="critic")[1] == ["a~0"]

    def test_where_and_order_by(self, scene: Scene) -> None:
        for index, reward in enumerate((0.5, 0.1, 0.9, None)):
            scene.fill(f"s-{index}", reward=reward, lr=index)
        _, names = scene.claim(2, task="actor", where="reward IS NOT NULL", order_by="reward DESC")
        assert names == ["s-2~0", "s-0~0"]
        assert scene.claim(task="actor", where="lr = 3 AND run = 'demo'")[1] == ["s-3~0"]
        for field, names in (("logprobs", []), ("routed_experts", ["s-1~0"])):
            where = f"list_contains(complete_fields, '{field}')"
            assert scene.claim(task="actor", where=where)[1] == names
        with pytest.raises(errors.InvalidQuery, match="nothing"):
            scene.claim(task="actor", where="nothing = 1")

    def test_sessions_are_whole(self, scene: Scene) -> None:
        scene.fill("a")
        scene.fill("b", segments=3)
        scene.fill("c")
        assert scene.claim(3, task="actor")[1] == ["a~0"], "b does not fit, and c is not taken before it"
        with pytest.raises(
            errors.LimitTooSmall, match="session 'b' has 3 segments, the limit is 2"
        ) as caught:
            scene.claim(2, task="actor")
        assert caught.value.details == {"unit": "b", "segments": 3, "limit": 2}
        assert scene.claim(task="actor", where="segment_index = 0")[1] == ["c~0"], "a part of b is not b"
        assert scene.claim(2, task="actor", unit="segment")[1] == ["b~0", "b~1"]
        assert scene.claim(9, task="actor")[1] == [], "b is taken in part"

    def test_what_is_left_of_a_session_is_whole(self, scene: Scene) -> None:
        scene.fill("a", segments=3)
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["a~1"], reason="bad"))
        assert scene.claim(2, task="actor")[1] == ["a~0", "a~2"]

    def test_order_by_keeps_sessions_together(self, scene: Scene) -> None:
        scene.fill("a", segments=2)
        scene.fill("b", segments=2)
        for name, reward in (("a~0", 1), ("b~1", 2), ("a~1", 3), ("b~0", 4)):
            command = UpdateSegments(run="demo", ids=[name], columns=f'{{"reward": {reward}}}')
            scene.catalog.execute(command)
        assert scene.claim(task="actor", order_by="reward")[1] == ["a~0", "a~1", "b~0", "b~1"]

    def test_groups_wait_until_they_are_whole(self, scene: Scene) -> None:
        scene.fill("alone")
        for index in range(2):
            scene.fill(f"g-{index}", group="g")
        assert scene.claim(task="actor", group_size=3)[1] == []
        scene.session("g-2", group="g")
        assert scene.claim(task="actor", unit="group")[1] == [], "a session is open"
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["g-2"], reason="slow"))
        with pytest.raises(errors.LimitTooSmall, match="group 'g' has 2 segments"):
            scene.claim(1, task="actor", group_size=3)
        assert scene.claim(2, task="actor", group_size=3)[1] == ["g-0~0", "g-1~0"]
        scene.fill("h-0", group="h")
        assert scene.claim(task="actor", group_size=3)[1] == []
        scene.catalog.execute(CloseGroup(run="demo", epoch=0, group="h"))
        assert scene.claim(task="actor", group_size=3)[1] == ["h-0~0"]
        with pytest.raises(errors.Conflict, match="group 'h' is closed"):
            scene.session("h-1", group="h")
        with pytest.raises(errors.InvalidInput, match="group_size"):
            scene.claim(task="actor", unit="segment", group_size=2)

    def test_stale_segments_are_left_or_discarded(self, scene: Scene) -> None:
        for index, version in enumerate(("1", "2", "3", None)):
            scene.fill(f"s-{index}", version=version, group="g" if index in (0, 2) else None)
        for version in ("1", "2", "3", "4"):
            scene.catalog.execute(SetPolicyVersion(run="demo", epoch=0, version=version))
        kept, names = scene.claim(task="actor", max_staleness=1)
        assert names == ["s-2~0", "s-3~0"], "a segment without a version is never stale"
        release(scene, kept)
        _, names = scene.claim(task="critic", max_staleness=2, on_stale="discard")
        assert names == ["s-1~0", "s-2~0", "s-3~0"]
        rows = {row["segment_id"]: row for row in scene.rows("segments")}
        assert (rows["s-0~0"]["status"], rows["s-0~0"]["reason"]) == ("discarded", "stale")

    def test_a_stale_segment_can_take_its_group_with_it(self, scene: Scene) -> None:
        scene.fill("a", version="1", group="g")
        scene.fill("b", version="2", group="g")
        scene.fill("c", version="2")
        _, names = scene.claim(task="actor", max_staleness=0, on_stale="discard_group")
        assert names == ["c~0"]
        assert statuses(scene) == {"a~0": "discarded", "b~0": "discarded", "c~0": "claimed"}

    def test_like_takes_the_same_segments(self, scene: Scene) -> None:
        for name in ("a", "b", "c"):
            scene.fill(name)
        actor, names = scene.claim(2, task="actor", order_by="session_id DESC")
        with pytest.raises(errors.LimitTooSmall, match="has 2 segments, the limit is 1"):
            scene.claim(1, task="critic", like=actor.claim_id)
        _, same = scene.claim(task="critic", like=actor.claim_id)
        assert same == names == ["c~0", "b~0"]
        with pytest.raises(errors.Conflict, match=r"'c~0' of claim .* is claimed for task 'critic'"):
            scene.claim(task="critic", like=actor.claim_id)
        with pytest.raises(errors.ClaimGone, match="no claim"):
            scene.claim(task="critic", like="0" * 32)

    def test_a_retried_claim_is_the_same(self, scene: Scene) -> None:
        scene.fill("a")
        command = Claim(run="demo", limit=1, task="actor", wait_s=20)
        first = scene.catalog.execute(command)
        assert scene.catalog.execute(command) == first
        scene.fill("b")
        assert scene.catalog.execute(command) == first
        assert statuses(scene) == {"a~0": "claimed", "b~0": "ready"}

    @pytest.mark.parametrize("unit", ["segment", "session", "group"])
    def test_a_claim_reads_what_it_takes_not_all_that_is_ready(
        self, scene: Scene, unit: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for index in range(60):
            scene.fill(f"s-{index}", group=f"g-{index // 2}")
        read: list[int] = []
        units, groups = selection._units, selection._groups

        def counted(rows: Iterator[object]) -> Iterator[object]:
            for row in rows:
                read.append(1)
                yield row

        monkeypatch.setattr(selection, "_units", lambda ready, wish: units(counted(ready), wish))
        monkeypatch.setattr(selection, "_groups", lambda c, ready, wish: groups(c, counted(ready), wish))
        assert len(scene.claim(4, task="actor", unit=unit)[1]) == 4
        assert len(read) <= 7
        with scene.catalog._readers.snapshot() as connection:
            plans: list[str] = []
            connection.exec_trace = lambda cursor, sql, _: plans.append(sql) is None
            run = scene.catalog._runs.get("demo")
            command = Claim(run="demo", limit=4, task="actor", unit=unit)
            selection.choose(connection, selection.make_wish(connection, run, command))
            connection.exec_trace = None
            (chosen,) = [sql for sql in plans if "ORDER BY segment_tasks.segment" in sql]
            plan = str(connection.execute(f"EXPLAIN QUERY PLAN {chosen}", (1, "actor", "lineage")).fetchall())
        assert "segment_tasks_ready" in plan
        assert "TEMP B-TREE" not in plan

    def test_groups_in_order(self, scene: Scene) -> None:
        for name, group in (("a", "g"), ("b", "h"), ("c", "g"), ("d", None), ("e", "h"), ("f", "i")):
            scene.fill(name, group=group, segments=2 if name == "a" else 1)
        scene.session("open", group="i")
        assert scene.claim(4, task="actor", unit="group")[1] == ["a~0", "a~1", "c~0"]
        assert scene.claim(9, task="actor", unit="group", where="session_id <> 'e'")[1] == []
        assert scene.claim(9, task="actor", unit="group")[1] == ["b~0", "e~0"]
        assert scene.claim(9, task="critic", unit="group", order_by="session_id DESC")[1] == [
            *("b~0", "e~0", "a~0", "a~1", "c~0"),
        ]


class TestRanks:
    def test_every_rank_sees_one_table_and_releases_for_itself(self, scene: Scene) -> None:
        ids = scene.fill("a", tasks=["actor"], note="x")
        info, _ = scene.claim(task="actor")
        first = attach(scene, info, 0, 2)
        scene.catalog.execute(UpdateSegments(run="demo", ids=["a"], columns='{"reward": 1}'))
        assert attach(scene, info, 1, 2) == attach(scene, info, 0, 2) == first
        with pytest.raises(errors.Conflict, match="a world of 2 ranks, not 3"):
            attach(scene, info, 0, 3)
        with pytest.raises(errors.InvalidInput, match="rank 2 of world 2"):
            attach(scene, info, 2, 2)
        with pytest.raises(errors.Conflict, match="shared by 2 ranks: each releases for itself"):
            release(scene, info)
        assert release(scene, info, 0, 2) == 0
        assert release(scene, info, 0, 2) == 0
        assert scene.released == []
        assert statuses(scene) == {"a~0": "claimed"}
        assert release(scene, info, 1, 2) == 1
        assert sorted(scene.released) == sorted(ids)
        assert statuses(scene) == {"a~0": "done"}
        assert release(scene, info, 1, 2) == release(scene, info) == 0
        with pytest.raises(errors.ClaimGone, match="is done"):
            attach(scene, info, 0, 2)
        with pytest.raises(errors.ClaimGone, match="is done"):
            scene.catalog.execute(RenewClaim(run="demo", claim_id=info.claim_id))

    def test_a_rank_that_never_attached_may_release(self, scene: Scene) -> None:
        scene.fill("a")
        info, _ = scene.claim(task="actor")
        with pytest.raises(errors.InvalidInput, match="no world was given"):
            release(scene, info, 0)
        assert release(scene, info, 0, 1) == 1

    def test_an_empty_claim_can_be_shared_and_released(self, scene: Scene) -> None:
        info, names = scene.claim(task="actor")
        assert (names, info.segments) == ([], 0)
        attach(scene, info, 0, 1)
        assert release(scene, info, 0, 1) == 0
        assert release(scene, info, 0, 1) == 0

    def test_a_chunk_lives_until_every_task_that_reads_it_is_done(self, scene: Scene) -> None:
        ids = scene.fill("a", segments=2)
        tokens = [one for one in ids if scene.pins.headers[one].field == "token_ids"]
        experts = [one for one in ids if scene.pins.headers[one].field == "routed_experts"]
        assert (len(tokens), len(experts)) == (2, 4), "experts have two layer groups"
        actor, critic = scene.claim(task="actor")[0], scene.claim(task="critic")[0]
        assert release(scene, actor) == 2
        assert (scene.states(tokens), scene.states(experts)) == ({"committed"}, {"released"})
        assert sorted(scene.released) == sorted(experts)
        scene.reopen()
        assert release(scene, critic) == 2
        assert scene.states(ids) == {"released"}
        assert sorted(scene.released) == sorted(ids)
        assert statuses(scene) == {"a~0": "done", "a~1": "done"}

    def test_a_field_that_no_task_reads_lives_until_all_are_done(self, scene: Scene) -> None:
        ids = scene.fill("a", tasks=["critic"])
        critic, _ = scene.claim(task="critic")
        assert scene.released == []
        release(scene, critic)
        assert sorted(scene.released) == sorted(ids)

    def test_a_segment_discarded_in_a_claim_is_not_done(self, scene: Scene) -> None:
        scene.fill("a", tasks=["actor"])
        kept = scene.fill("b", tasks=["actor"])
        info, _ = scene.claim(task="actor")
        scene.catalog.execute(Discard(run="demo", epoch=0, ids=["a"], reason="bad"))
        assert scene.states(kept) == {"committed"}
        assert release(scene, info) == 1
        assert statuses(scene) == {"a~0": "discarded", "b~0": "done"}
        with pytest.raises(errors.ChunkReleased, match="bad"):
            scene.catalog.execute(GetSegments(run="demo", ids=["a~0"]))


class TestLeases:
    def test_an_expired_claim_gives_its_segments_back(self, scene: Scene) -> None:
        ids = scene.fill("a")
        info, _ = scene.claim(task="actor", lease_s=60)
        attach(scene, info, 0, 2)
        release(scene, info, 0, 2)
        end_leases_in(scene, 0)
        for ask in (
            lambda: release(scene, info, 1, 2),
            lambda: attach(scene, info, 1, 2),
            lambda: scene.catalog.execute(RenewClaim(run="demo", claim_id=info.claim_id)),
        ):
            with pytest.raises(errors.ClaimGone, match="is expired"):
                ask()
        scene.catalog.maintain()
        assert statuses(scene) == {"a~0": "ready"}
        again, names = scene.claim(task="actor")
        assert names == ["a~0"]
        with pytest.raises(errors.ClaimGone):
            release(scene, info, 1, 2)
        assert scene.states(ids) == {"committed"}
        assert release(scene, again) == 1

    def test_a_claim_sees_expired_leases_at_once(self, scene: Scene) -> None:
        scene.fill("a")
        scene.claim(task="actor", lease_s=60)
        assert scene.claim(task="actor")[1] == []
        end_leases_in(scene, 0)
        assert scene.claim(task="actor")[1] == ["a~0"]

    def test_a_renewed_lease_goes_on(self, scene: Scene) -> None:
        scene.fill("a")
        info, _ = scene.claim(task="actor", lease_s=600)
        end_leases_in(scene, 30)
        scene.catalog.execute(RenewClaim(run="demo", claim_id=info.claim_id))
        with scene.catalog._readers.snapshot() as connection:
            expires_at = connection.execute("SELECT expires_at FROM claims").get
        assert 500 < expires_at / 1e6 - time.time() <= 600
        scene.catalog.maintain()
        assert release(scene, info) == 1

    def test_a_lease_outlives_a_restart(self, scene: Scene) -> None:
        scene.fill("a")
        info, names = scene.claim(task="actor")
        scene.reopen()
        assert scene.claim(task="actor")[1] == []
        assert names == ["a~0"]
        assert release(scene, info) == 1

    def test_a_server_that_was_down_grants_half_a_lease(self, scene: Scene) -> None:
        scene.fill("a")
        scene.fill("b")
        late, _ = scene.claim(1, task="actor", lease_s=60)
        fresh, _ = scene.claim(1, task="critic", lease_s=60)
        past_us = int((time.time() - 100) * 1e6)
        expire = "UPDATE claims SET expires_at = ? WHERE claim_id = ?"
        scene.catalog._writer.run([lambda change: change.execute(expire, (past_us, late.claim_id))])
        scene.reopen()
        scene.catalog.grant_grace()
        scene.catalog.maintain()
        ends = {row["claim_id"]: row["expires_at"].timestamp() - time.time() for row in scene.rows("claims")}
        assert 20 < ends[late.claim_id] <= 30
        assert 50 < ends[fresh.claim_id] <= 60
        assert release(scene, late) == 1


class TestWaiting:
    def test_a_claim_waits_and_is_woken(self, scene: Scene) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(scene.claim, 1, task="actor", wait_s=30)
            until = time.monotonic() + 10
            while not scene.catalog._waiters.waiting:
                assert time.monotonic() < until
                time.sleep(0.005)
            assert scene.catalog.gauges().waiters == 1
            started = time.monotonic()
            scene.fill("a")
            assert waiting.result(20)[1] == ["a~0"]
        assert time.monotonic() - started < 5

    def test_nothing_is_taken_for_a_claimer_that_went_away(self, scene: Scene) -> None:
        command = Claim(run="demo", limit=1, task="actor", wait_s=30)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(scene.catalog.claim, command, lambda: True)
            until = time.monotonic() + 10
            while not scene.catalog._waiters.waiting:
                assert time.monotonic() < until
                time.sleep(0.005)
            scene.fill("a")
            with pytest.raises(errors.Unavailable, match="went away"):
                waiting.result(10)
        assert statuses(scene) == {"a~0": "ready"}
        assert scene.catalog.execute(command).body.segments == 1, "the same request again is answered anew"

    def test_many_waiters_share_their_looks(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = 0

        def counted(connection: object, wish: object) -> list[int]:
            nonlocal looks
            looks += 1
            return choose(connection, wish)  # type: ignore[arg-type]

        monkeypatch.setattr(claiming, "choose", counted)
        commits = 40
        with ThreadPoolExecutor(24) as pool:
            waiting = [
                pool.submit(scene.claim, 1, task="actor", where="reward > 5", wait_s=20) for _ in range(24)
            ]
            until = time.monotonic() + 10
            while scene.catalog._waiters.waiting < 24:
                assert time.monotonic() < until
                time.sleep(0.005)
            for index in range(commits):
                scene.fill(f"s-{index}", reward=1.0)
            for index in range(24):
                scene.fill(f"t-{index}", reward=9.0)
            taken = [name for one in waiting for name in one.result(30)[1]]
        assert sorted(taken) == sorted(f"t-{index}~0" for index in range(24))
        assert looks < 24 * commits / 2, "not one look a waiter and commit"

    def test_an_empty_batch_when_time_is_over(self, scene: Scene) -> None:
        started = time.monotonic()
        assert scene.claim(1, task="actor", wait_s=0.2)[1] == []
        assert 0.2 <= time.monotonic() - started < 5

    def test_closing_ends_the_wait(self, scene: Scene) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(scene.claim, 1, task="actor", wait_s=60)
            time.sleep(0.1)
            scene.catalog.close()
            with pytest.raises(errors.Unavailable, match="closed"):
                waiting.result(10)

    def test_eight_claimers_take_each_segment_once(self, scene: Scene) -> None:
        names = [f"s-{index}" for index in range(48)]
        for name in names[:24]:
            scene.fill(name)
        taken: list[str] = []
        lock = Lock()

        def work(_: int) -> None:
            while True:
                info, mine = scene.claim(3, task="actor", wait_s=1.0)
                if not mine:
                    return
                with lock:
                    taken.extend(mine)
                release(scene, info)

        with ThreadPoolExecutor(9) as pool:
            claimers = [pool.submit(work, index) for index in range(8)]
            for name in names[24:]:
                scene.fill(name)
            for claimer in claimers:
                claimer.result(60)
        assert sorted(taken) == sorted(f"{name}~0" for name in names)
