"""Finalizing: domains, holes, overlay and rewrite."""

from __future__ import annotations

import numpy as np
import pytest

from arrow_tq import errors, fields
from arrow_tq.interface import Store
from arrow_tq.testing.rollouts import make_rollout, write_rollout
from arrow_tq.testing.scenes import chunks_stored, open_run, wait_until


class SegmentConformance:
    """Finalizing: domains, holes, overlay and rewrite."""

    def test_finalize_says_what_the_segment_holds(self, store: Store) -> None:
        run = open_run(store)
        rollout = make_rollout(1)
        session = run.session("s", group="g", source="unit")
        write_rollout(session, rollout, version="7")
        (segment,) = session.finalize(reward=0.5, difficulty=3)
        (row,) = run.sql("SELECT * FROM segments").to_pylist()
        sampled = sum(end - prompt_end for _, prompt_end, end in rollout.turns)
        assert segment.num_tokens == row["num_tokens"] == len(rollout.tokens)
        assert segment.loss_tokens == row["loss_tokens"] == sampled
        assert sorted(segment.complete_fields) == ["logprobs", "routed_experts", "token_ids"]
        assert (row["group_id"], row["reward"], row["view"], row["status"]) == ("g", 0.5, "lineage", "ready")
        assert (row["segment_index"], row["segment_count"]) == (0, 1)
        assert (row["version_min"], row["version_max"]) == ("7", "7")
        assert (row["source"], row["difficulty"]) == ("unit", 3)
        assert session.finalize(reward=0.5, difficulty=3) == [segment]
        with pytest.raises(errors.SessionClosed), session.step() as step:
            step.put("token_ids", [1], start=0)

    def test_a_fetch_tells_which_version_sampled_each_token(self, store: Store) -> None:
        run = open_run(store)
        for number, versions in enumerate((("7", "8", None), ("8", "9", "9"))):
            session = run.session(f"s-{number}")
            for index, version in enumerate(versions):
                start = 4 * index
                with session.step(version=version, sampled=(start + 2, start + 4)) as step:
                    step.put("token_ids", np.arange(4), start=start)
                    step.put("logprobs", np.zeros(2), start=start + 2)
            session.finalize()
        batch = run.claim(2)
        assert batch.table.select(["version_min", "version_max"]).to_pylist() == [
            {"version_min": "7", "version_max": "8"},
            {"version_min": "8", "version_max": "9"},
        ]
        data = batch.fetch("logprobs", expect_tokens=[np.tile(np.arange(4), 3)] * 2)
        assert data.versions.names == ("7", "8", "9")
        assert [one.tolist() for one in data.versions] == [
            [-1, -1, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1],
            [-1, -1, 1, 1, -1, -1, 2, 2, -1, -1, 2, 2],
        ]
        assert data.versions.packed.shape == data["logprobs"].packed.shape
        assert data.versions.ranges(1) == [(2, 4, "8"), (6, 8, "9"), (10, 12, "9")]
        alone = batch.select([1]).fetch([])
        assert (len(alone), len(alone.versions), alone.versions.names) == (0, 1, ("8", "9"))
        assert alone.versions[-1].tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, -1, -1, 1, 1]
        assert batch.fetch([], rows=[]).versions.packed.tolist() == []

    def test_a_hole_is_an_error_that_names_its_positions(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        with session.step(sampled=(2, 6)) as step:
            step.put("token_ids", np.arange(6), start=0)
            step.put("logprobs", np.zeros(2), start=2)
        (segment,) = session.finalize()
        assert segment.complete_fields == ["token_ids"]
        batch = run.claim(1)
        with pytest.raises(errors.Hole, match=r"logprobs.*4\.\.5") as caught:
            batch.fetch("logprobs")
        assert caught.value.details["positions"] == [4, 6]
        assert batch.fetch("token_ids")["token_ids"][0].tolist() == list(range(6))

    def test_rows_of_minus_one_are_holes_unless_the_field_pads(self, store: Store) -> None:
        run = store.run(
            "rows", fields=[fields.token_ids(), fields.routed_experts(1, 2, 8), fields.indexer_topk(1, 2)]
        )
        session = run.session("s")
        experts = np.array([[[1, 2]], [[-1, -1]], [[3, 4]]], np.int32)
        with session.step() as step:
            step.put("token_ids", np.arange(4), start=0)
            step.put("routed_experts", experts, start=0)
            step.put("indexer_topk", experts, start=0)
        (segment,) = session.finalize()
        assert sorted(segment.complete_fields) == ["indexer_topk", "token_ids"]
        batch = run.claim(1)
        np.testing.assert_array_equal(batch.fetch("indexer_topk")["indexer_topk"][0], experts)
        with pytest.raises(errors.Hole, match=r"routed_experts.*1\.\.1"):
            batch.fetch("routed_experts")

    def test_equal_tokens_again_are_overlay(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        tokens = np.arange(10, 22)
        with session.step(sampled=(3, 8)) as step:
            step.put("token_ids", tokens[:8], start=0)
            step.put("logprobs", np.full(5, -1.0), start=3)
            step.put("routed_experts", np.full((7, 6, 2), 1), start=0)
        with session.step(sampled=(10, 12)) as step:
            step.put("token_ids", tokens, start=0)
            step.put("logprobs", np.full(9, -2.0), start=3)
            step.put("routed_experts", np.full((11, 6, 2), 2), start=0)
        (segment,) = session.finalize()
        assert (segment.num_tokens, segment.loss_tokens) == (12, 7)
        data = run.claim(1).fetch(["token_ids", "logprobs", "routed_experts"])
        assert data["token_ids"][0].tolist() == tokens.tolist()
        # The last write wins for log-probs, the first for routing.
        assert data["logprobs"][0].tolist() == [0.0] * 3 + [-2.0] * 5 + [0.0] * 2 + [-2.0] * 2
        assert data["routed_experts"][0][:, 0, 0].tolist() == [1] * 7 + [2] * 4

    def test_other_tokens_end_the_segment_and_begin_another(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        with session.step(sampled=(2, 6)) as step:
            step.put("token_ids", [1, 2, 3, 4, 5, 6], start=0)
            step.put("logprobs", [-1.0] * 4, start=2)
        with session.step(sampled=(5, 7)) as step:
            step.put("token_ids", [1, 2, 3, 9, 9, 7, 8], start=0)
            step.put("logprobs", [-2.0] * 2, start=5)
        first, second = session.finalize()
        assert (first.finish_reason, second.finish_reason) == ("rewrite", "end")
        assert (first.loss_tokens, second.loss_tokens) == (4, 2)
        data = run.claim(2).fetch(["token_ids", "logprobs"])
        assert data["token_ids"][0].tolist() == [1, 2, 3, 4, 5, 6]
        assert data["token_ids"][1].tolist() == [1, 2, 3, 9, 9, 7, 8]
        assert data["logprobs"][1].tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, -2.0, -2.0]
        row = run.sql("SELECT rewrite_at FROM steps ORDER BY step_index").column(0).to_pylist()
        assert row == [None, 3]

    def test_abort_frees_everything(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        write_rollout(session, make_rollout(0))
        assert chunks_stored(store) > 0
        session.abort("user left")
        wait_until(lambda: chunks_stored(store) == 0)
        (row,) = run.sql("SELECT status, reason FROM sessions").to_pylist()
        assert row == {"status": "aborted", "reason": "user left"}
        with pytest.raises(errors.SessionClosed):
            run.session("s")
