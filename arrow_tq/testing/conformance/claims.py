"""Claims, ranks, releases."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from arrow_tq import Task, errors
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.rollouts import make_rollout, write_rollout
from arrow_tq.testing.scenes import chunks_stored, fill, open_run, wait_until


class ClaimConformance:
    """Claims, ranks, releases."""

    def test_each_segment_is_claimed_once_a_task(self, store: Store) -> None:
        run = open_run(store, tasks=("actor", "critic"))
        kept = fill(run, 5)
        first, second = run.claim(3, task="actor"), run.claim(3, task="actor")
        assert first.segment_ids + second.segment_ids == list(kept)
        assert len(run.claim(3, task="actor")) == 0
        assert run.claim(9, task="critic").segment_ids == list(kept)
        with pytest.raises(errors.InvalidInput, match="task"):
            run.claim(1)

    def test_values_that_do_not_fit_are_the_callers_mistake(self, store: Store) -> None:
        run = open_run(store)
        for wrong in ({"limit": 0}, {"limit": 1, "unit": "token"}, {"limit": 1, "lease_s": -1}):
            with pytest.raises(errors.InvalidInput, match=f"claim: {list(wrong)[-1]}"):
                run.claim(**wrong)
        with pytest.raises(errors.InvalidInput, match="rank"):
            run.attach(run.claim(1).ref, rank=2, world=2)
        with pytest.raises(errors.InvalidInput, match="reward"):
            run.session("s").finalize(reward=float("nan"))

    def test_where_and_order_choose(self, store: Store) -> None:
        run = open_run(store)
        kept = list(fill(run, 5))
        batch = run.claim(2, where="reward >= 0.1 AND reward < 0.4", order_by="reward DESC")
        assert batch.segment_ids == [kept[3], kept[2]]
        with pytest.raises(errors.InvalidQuery, match="nothing"):
            run.claim(1, where="nothing > 3")

    def test_ranks_see_one_table_and_release_apart(self, store: Store) -> None:
        run = open_run(store)
        fill(run, 3)
        claimed = run.claim(3)
        assert len(claimed.ref) < 1024
        ranks = [run.attach(claimed.ref, rank=rank, world=2) for rank in range(2)]
        assert ranks[0].table.equals(ranks[1].table)
        assert ranks[0].table.equals(claimed.table)
        before = chunks_stored(store)
        ranks[0].release()
        ranks[0].release()
        assert chunks_stored(store) == before
        ranks[1].fetch("token_ids")
        ranks[1].release()
        wait_until(lambda: chunks_stored(store) == 0)
        assert run.sql("SELECT DISTINCT status FROM segments").column(0).to_pylist() == ["done"]
        assert set(run.sql("SELECT DISTINCT state FROM chunks").column(0).to_pylist()) == {"released"}
        with pytest.raises(errors.ChunkReleased):
            run.table(claimed.segment_ids, fields=["token_ids"])

    def test_a_chunk_lives_until_every_task_that_reads_it_is_done(self, store: Store) -> None:
        run = open_run(store, tasks=(Task("actor"), Task("critic", fields=["token_ids"])))
        fill(run, 1)
        actor, critic = run.claim(1, task="actor"), run.claim(1, task="critic")
        actor.release()
        wait_until(lambda: set(self._live_fields(run)) == {"token_ids"})
        assert len(critic.fetch("token_ids")["token_ids"][0])
        critic.release()
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_lease_that_expires_gives_the_segments_back(self, store: Store) -> None:
        run = open_run(store)
        kept = list(fill(run, 2))
        batch = run.claim(2, lease_s=0.6)
        time.sleep(1.0)
        assert len(run.claim(2)) == 0, "the lease is renewed while the batch is in use"
        assert batch._keeper is not None
        batch._keeper.stop()
        again = run.claim(2, wait_s=10)
        assert again.segment_ids == kept
        with pytest.raises(errors.ClaimGone):
            batch.release()
        again.release()

    def test_a_waiting_claim_is_woken(self, store: Store) -> None:
        run = open_run(store)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(run.claim, 1, wait_s=30)
            wait_until(lambda: store.pressure().waiters == 1)
            started = time.monotonic()
            kept = fill(run, 1)
            assert waiting.result(10).segment_ids == list(kept)
        assert time.monotonic() - started < 5

    def test_a_session_is_never_split(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        for tokens in ([1, 2], [3, 4], [5, 6]):
            with session.step() as step:
                step.put("token_ids", tokens, start=0)
        assert len(session.finalize()) == 3
        with pytest.raises(errors.LimitTooSmall, match="3"):
            run.claim(2)
        assert len(run.claim(3)) == 3

    def test_discarded_segments_keep_their_row(self, store: Store) -> None:
        run = open_run(store)
        kept = list(fill(run, 3))
        assert run.discard(kept[0], reason="stale") == 1
        assert run.discard(where="reward > 0.15", reason="filtered") == 1
        assert run.claim(5).segment_ids == [kept[1]]
        rows = run.sql("SELECT status, reason FROM segments ORDER BY segment_id").to_pylist()
        assert [row["reason"] for row in rows] == ["stale", None, "filtered"]
        with pytest.raises(errors.ChunkReleased, match="stale"):
            run.table(kept[0], fields=["token_ids"])
        with pytest.raises(errors.InvalidInput):
            run.discard(reason="nothing named")

    def test_late_values_are_seen_by_where_and_sql(self, store: Store) -> None:
        run = open_run(store)
        for index in range(3):
            session = run.session(f"s-{index}")
            write_rollout(session, make_rollout(index))
            session.finalize()
        assert len(run.claim(9, where="reward IS NOT NULL")) == 0
        assert run.update(["s-0", "s-2"], reward=1.0, judge="gpt") == 2
        assert run.claim(9, where="reward IS NOT NULL AND judge = 'gpt'").table.num_rows == 2
        assert run.sql("SELECT avg(reward) AS m FROM segments").column("m").to_pylist() == [1.0]
        with pytest.raises(errors.NotFound, match="nobody"):
            run.update("nobody", reward=0.0)

    @staticmethod
    def _live_fields(run: Run) -> list[str]:
        live = run.sql("SELECT DISTINCT field FROM chunks WHERE state = 'committed'")
        return [str(name) for name in live.column(0).to_pylist()]
