"""Values that trainers put after a session was finalized."""

from __future__ import annotations

import numpy as np
import pytest

from arrow_tq import Field, Task, errors, fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.rollouts import declared_fields, make_rollout, write_rollout
from arrow_tq.testing.scenes import chunks_stored, fill, wait_until

VALUES = Field("values", "float32")
OLD = fields.logprobs("old_logprobs")
HIDDEN = Field("hidden", "bfloat16", shape=(4,), domain="forwarded")


def open_run(store: Store, tasks: tuple[Task | str, ...] = ("actor", "critic")) -> Run:
    return store.run("late", fields=[*declared_fields(), VALUES, OLD, HIDDEN], tasks=tasks)


class LateValueConformance:
    """Values that trainers put after a session was finalized."""

    def test_another_task_claims_on_them_and_reads_them(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 3)
        critic = run.claim(3, task="critic")
        where = "list_contains(complete_fields, 'values')"
        assert len(run.claim(3, task="actor", where=where)) == 0
        arrays = [np.arange(len(kept[name].tokens)) / 8 for name in critic.segment_ids]
        assert critic.put("values", arrays[:2], rows=[0, 1]) == 2
        actor = run.claim(3, task="actor", where=where)
        assert actor.segment_ids == critic.segment_ids[:2]
        data = actor.fetch(["values", "token_ids"])
        for index in range(2):
            assert data["values"][index].tolist() == arrays[index].tolist()
        shown = run.sql("SELECT segment_id, complete_fields FROM segments ORDER BY 1").to_pylist()
        assert ["values" in row["complete_fields"] for row in shown] == [True, True, False]
        assert run.sql("SELECT count(*) AS n FROM spans WHERE field = 'values'").to_pylist() == [{"n": 2}]
        with pytest.raises(errors.Hole, match="values"):
            critic.fetch("values", rows=[2])
        critic.release()
        assert run.table(actor.segment_ids[0], ["values"]).num_rows == 1
        actor.release()
        wait_until(lambda: chunks_stored(store) == self._chunks_of_the_rest(run))

    def test_every_layout_of_the_rows_is_taken(self, store: Store) -> None:
        run = open_run(store, tasks=("actor",))
        kept = fill(run, 2)
        batch = run.claim(2)
        rollouts = [kept[name] for name in batch.segment_ids]
        whole = [np.where(one.logprobs != 0, one.logprobs - 1, 0) for one in rollouts]
        starts = [one.turns[0][1] for one in rollouts]
        sampled = [
            np.concatenate([row[first:end] for _, first, end in one.turns])
            for row, one in zip(whole, rollouts, strict=True)
        ]
        response = [row[start:] for row, start in zip(whole, starts, strict=True)]
        assert batch.put("old_logprobs", np.concatenate(whole)) == 2
        assert batch.put("old_logprobs", whole) == 0
        data = batch.fetch("old_logprobs")
        for index, row in enumerate(whole):
            np.testing.assert_array_equal(data["old_logprobs"][index], row)
            np.testing.assert_array_equal(data.response("old_logprobs")[index], response[index])
            np.testing.assert_array_equal(data.sampled("old_logprobs")[index], sampled[index])
        second = fill(run, 2, group="g")
        later = run.claim(2)
        names = [second[name] for name in later.segment_ids]
        assert later.put("old_logprobs", [one.logprobs[one.turns[0][1] :] for one in names]) == 2
        np.testing.assert_array_equal(
            later.fetch("old_logprobs")["old_logprobs"].packed,
            np.concatenate([one.logprobs for one in names]),
        )
        bits = [np.arange((len(one.tokens) - 1) * 4, dtype=np.uint16).reshape(-1, 4) for one in names]
        assert later.put("hidden", bits) == 2
        for index, one in enumerate(later.fetch("hidden")["hidden"]):
            np.testing.assert_array_equal(one, bits[index])
        with pytest.raises(errors.RowCountMismatch, match=r"3 rows, expected \d+ or"):
            later.put("old_logprobs", [np.zeros(3), np.zeros(3)])
        with pytest.raises(errors.RowCountMismatch, match="1 arrays for 2 segments"):
            later.put("old_logprobs", [np.zeros(3)])

    def test_sampled_rows_alone_are_taken(self, store: Store) -> None:
        run = open_run(store, tasks=("actor",))
        kept = fill(run, 1)
        batch = run.claim(1)
        (one,) = kept.values()
        parts = [one.logprobs[first:end] for _, first, end in one.turns]
        assert batch.put("old_logprobs", [np.concatenate(parts)]) == 1
        np.testing.assert_array_equal(batch.fetch("old_logprobs")["old_logprobs"][0], one.logprobs)

    def test_the_same_again_is_the_same_and_others_are_refused(self, store: Store) -> None:
        run = open_run(store, tasks=("actor",))
        kept = fill(run, 2)
        batch = run.claim(2)
        arrays = [np.ones(len(kept[name].tokens)) for name in batch.segment_ids]
        assert batch.put("values", arrays) == 2
        stored = chunks_stored(store)
        assert batch.put("values", arrays) == 0
        with pytest.raises(errors.Conflict, match="other values"):
            batch.put("values", [array * 2 for array in arrays])
        with pytest.raises(errors.Conflict, match="from its rollout"):
            batch.put("logprobs", [array * 0 for array in arrays])
        wait_until(lambda: chunks_stored(store) == stored)
        assert set(batch.fetch("values")["values"].packed.tolist()) == {1.0}

    def test_a_claim_that_ran_out_is_replaced(self, store: Store) -> None:
        run = open_run(store, tasks=("actor",))
        kept = fill(run, 1)
        (one,) = kept.values()
        first = run.claim(1, lease_s=0.3)
        first.put("values", [np.ones(len(one.tokens))])
        assert first._keeper is not None
        first._keeper.stop()
        stored = chunks_stored(store)
        second = run.claim(1, wait_s=10)
        assert second.put("values", [np.full(len(one.tokens), 2.0)]) == 1
        assert set(second.fetch("values")["values"].packed.tolist()) == {2.0}
        wait_until(lambda: chunks_stored(store) == stored)
        with pytest.raises(errors.ClaimGone):
            first.put("values", [np.full(len(one.tokens), 3.0)])
        second.release()
        wait_until(lambda: chunks_stored(store) == 0)

    def test_nothing_is_put_where_nobody_would_read_it(self, store: Store) -> None:
        run = open_run(store, tasks=(Task("actor", ["token_ids", "values"]), Task("critic", ["token_ids"])))
        kept = fill(run, 1)
        (one,) = kept.values()
        actor, critic = run.claim(1, task="actor"), run.claim(1, task="critic")
        actor.release()
        with pytest.raises(errors.ChunkReleased, match="every task that reads"):
            critic.put("values", [np.ones(len(one.tokens))])
        critic.release()
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_discarded_segment_frees_them(self, store: Store) -> None:
        run = open_run(store, tasks=("actor",))
        kept = fill(run, 2)
        batch = run.claim(2)
        batch.put("values", [np.ones(len(kept[name].tokens)) for name in batch.segment_ids])
        run.discard(batch.segment_ids, reason="stale")
        wait_until(lambda: chunks_stored(store) == 0)
        with pytest.raises(errors.ChunkReleased):
            batch.put("values", [np.ones(len(kept[name].tokens)) for name in batch.segment_ids])

    def test_a_field_can_be_declared_late(self, store: Store) -> None:
        run = store.run("bare", fields=declared_fields())
        other = store.run("bare")
        write_rollout(run.session("s"), make_rollout(1))
        run.session("s").finalize()
        teacher = Field("teacher", "float32", shape=(2,))
        run.add_field(teacher)
        run.add_field(teacher)
        with pytest.raises(errors.Conflict, match="teacher"):
            run.add_field(Field("teacher", "float64", shape=(2,)))
        batch = other.claim(1)
        rows = np.ones((len(make_rollout(1).tokens), 2))
        assert batch.put("teacher", [rows]) == 1
        np.testing.assert_array_equal(batch.fetch("teacher")["teacher"][0], rows)
        assert store.run("bare", fields=declared_fields()).field("teacher") == teacher
        assert store.run("bare", fields=[*declared_fields(), teacher]).field("teacher") == teacher
        write_rollout(run.session("t"), make_rollout(2))
        (segment,) = run.session("t").finalize()
        assert "teacher" not in segment.complete_fields
        batch.release()

    @staticmethod
    def _chunks_of_the_rest(run: Run) -> int:
        left = run.sql("SELECT count(*) AS n FROM chunks WHERE state = 'committed'")
        return int(left.column(0)[0].as_py())
