"""Marks, rewinds, and what is readable after them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from arrow_tq import Field, errors
from arrow_tq.interface import Store
from arrow_tq.offline import Selection, export_segments, import_export
from arrow_tq.runs import Run
from arrow_tq.testing.rollouts import Rollout, declared_fields
from arrow_tq.testing.scenes import chunks_stored, fill, open_run, wait_until


class CheckpointConformance:
    """Marks, rewinds, and what is readable after them."""

    def test_what_was_released_since_a_mark_is_there_again(self, store: Store) -> None:
        run = open_run(store)
        before = fill(run, 2, group="before")
        run.claim(9).release()
        wait_until(lambda: chunks_stored(store) == 0)
        assert run.mark("step-100").status == "live"
        kept = fill(run, 3, group="since")
        run.claim(2).release()
        under_way = run.claim(9)
        in_flight = run.session("in-flight")
        rewound = run.rewind("step-100")
        assert (rewound.epoch, run.epoch) == (1, 1)
        assert rewound.segments == list(kept)
        assert [one.session_id for one in rewound.sessions] == ["in-flight"]
        with pytest.raises(errors.ClaimGone, match="rewound"):
            under_way.release()
        with pytest.raises(errors.SessionClosed):
            in_flight.finalize()
        batch = run.claim(9)
        assert batch.segment_ids == list(kept)
        self._same(run, batch.segment_ids, kept)
        with pytest.raises(errors.ChunkReleased):
            run.table(list(before))
        batch.release()
        assert run.mark("step-110").freed == 3
        wait_until(lambda: chunks_stored(store) == 0)
        with pytest.raises(errors.MarkSpent, match="step-110"):
            run.rewind("step-100")

    def test_marks_and_claims_are_tables(self, store: Store) -> None:
        run = open_run(store)
        fill(run, 2)
        run.mark("one")
        run.claim(1).release()
        claimed = run.claim(1, lease_s=60)
        rows = run.sql("SELECT mark, status, kept_segments FROM marks").to_pylist()
        assert rows == [{"mark": "one", "status": "live", "kept_segments": 1}]
        rows = run.sql("SELECT state, segments, lease_s FROM claims ORDER BY created_at").to_pylist()
        assert [(row["state"], row["segments"]) for row in rows] == [("done", 1), ("active", 1)]
        assert rows[1]["lease_s"] == 60
        stats = store.stats()
        assert (stats["claims_active"], stats["claimed_segments"], stats["kept_segments"]) == (1, 1, 1)
        assert 0 < stats["lease_ends_s"] <= 60
        assert stats['claims_ended_total{end="done"}'] == 1
        claimed.release()

    def test_the_old_epoch_is_fenced(self, store: Store) -> None:
        run = open_run(store)
        fill(run, 1)
        run.mark("one")
        old = store.run("demo")
        run.claim(1).release()
        run.rewind("one")
        for attempt in (lambda: old.claim(1), lambda: old.session("x"), lambda: old.rewind("one")):
            with pytest.raises(errors.StaleEpoch):
                attempt()
        batch = run.claim(1)
        with pytest.raises(errors.StaleEpoch):
            old.attach(batch.ref, 0, 1)
        assert len(store.run("demo").attach(batch.ref, 0, 1)) == 1

    def test_marks_have_awaitable_twins(self, store: Store) -> None:
        async def scene() -> None:
            run = open_run(store)
            kept = await asyncio.to_thread(fill, run, 1)
            await run.amark("one")
            await (await run.aclaim(1)).arelease()
            assert (await run.arewind("one")).segments == list(kept)

        asyncio.run(scene())

    def test_late_values_outlive_a_mark_and_a_rewind(self, store: Store) -> None:
        declared = [*declared_fields(), Field("values", "float32")]
        run = store.run("late", fields=declared, tasks=("actor", "critic"))
        ((name, rollout),) = fill(run, 1).items()
        values = np.arange(len(rollout.tokens), dtype=np.float32)
        run.mark("one")
        run.claim(1, task="actor").release()
        critic = run.claim(1, task="critic")
        critic.put("values", [values])
        run.mark("two")
        np.testing.assert_array_equal(critic.fetch("values")["values"][0], values)
        critic.release()
        assert run.rewind("two").segments == [name]
        again = run.claim(1, task="critic")
        np.testing.assert_array_equal(again.fetch("values")["values"][0], values)
        again.put("values", [values + 1])
        np.testing.assert_array_equal(again.fetch("values")["values"][0], values + 1)
        again.release()
        run.mark("three")
        wait_until(lambda: chunks_stored(store) == 0)

    def test_an_export_without_late_values(self, store: Store, tmp_path: Path) -> None:
        declared = [*declared_fields(), Field("values", "float32")]
        run = store.run("late", fields=declared)
        ((name, rollout),) = fill(run, 1).items()
        batch = run.claim(1)
        batch.put("values", [np.ones(len(rollout.tokens), np.float32)])
        export_segments(run, Selection(batch.segment_ids), tmp_path / "out")
        import_export(store, tmp_path / "out", "again")
        self._same(store.run("again"), [name], {name: rollout})

    def test_an_export_is_the_same_in_another_run(self, store: Store, tmp_path: Path) -> None:
        run = open_run(store)
        kept = fill(run, 3, group="g")
        batch = run.claim(2)
        export_segments(run, Selection(batch.segment_ids), tmp_path / "out")
        assert import_export(store, tmp_path / "out", "again").sessions == 2
        again = store.run("again").claim(9)
        assert again.segment_ids == batch.segment_ids == list(kept)[:2]
        self._same(again.run, again.segment_ids, kept)

    @staticmethod
    def _same(run: Run, names: list[str], kept: dict[str, Rollout]) -> None:
        """The stored payload of these segments is what was written, bit by bit."""
        table = run.table(names, fields=["token_ids", "logprobs", "routed_experts"])
        for name, row in zip(names, table.to_pylist(), strict=True):
            rollout = kept[name]
            np.testing.assert_array_equal(np.array(row["token_ids"], np.int32), rollout.tokens)
            np.testing.assert_array_equal(np.array(row["logprobs"], np.float32), rollout.logprobs)
            experts = np.array(row["routed_experts"], np.uint8).reshape(rollout.experts.shape)
            np.testing.assert_array_equal(experts, rollout.experts)
