"""Ranks, plans, fetches, handles."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from arrow_tq import errors, fields
from arrow_tq.interface import Store
from arrow_tq.testing.layouts import pad_multiple, zigzag
from arrow_tq.testing.rollouts import LAYER_IDS, make_rollout, write_rollout
from arrow_tq.testing.scenes import bytes_read, fill, open_run, wait_until
from arrow_tq.trainer import PlanPolicy


class TrainerConformance:
    """Ranks, plans, fetches, handles."""

    def test_ranks_plan_alike_and_read_nothing_before_they_fetch(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 9)
        before = bytes_read(store)
        ref = run.claim(9).ref
        ranks = [run.attach(ref, rank=rank, world=2) for rank in range(2)]
        plans = [batch.plan(max_tokens=120, seed=7) for batch in ranks]
        for batch in ranks:
            batch.handles("routed_experts")
        assert bytes_read(store) == before
        assert plans[0].rows_by_rank == plans[1].rows_by_rank
        assert len(plans[0]) == len(plans[1])
        seen = [name for plan in plans for micro in plan for name in micro.segment_ids]
        assert sorted(seen) == sorted(kept)
        for plan in plans:
            for micro in plan:
                assert micro.num_tokens <= 120
                assert micro.table.column("segment_id").to_pylist() == micro.segment_ids
                for _ in range(2):
                    data = micro.fetch(["token_ids", "routed_experts"])
                    for index, name in enumerate(micro.segment_ids):
                        np.testing.assert_array_equal(data["routed_experts"][index], kept[name].experts)
                    micro.close()
        assert bytes_read(store) > before
        with pytest.raises(errors.InvalidInput, match="longer than max_tokens 10"):
            ranks[0].plan(max_tokens=10)
        alone = ranks[0].plan(max_tokens=10, policy=PlanPolicy(oversize="alone"))
        assert {len(micro) for micro in alone} <= {0, 1}
        ranks[0].release()
        ranks[1].release()
        wait_until(lambda: store.stats()["chunks"] == 0)

    def test_a_rank_that_asks_for_half_the_layers_moves_half_the_bytes(self, store: Store) -> None:
        run = store.run("layers", fields=[fields.token_ids(), fields.routed_experts(layers=40, topk=8)])
        experts = np.random.default_rng(0).integers(0, 256, (99, 40, 8), dtype=np.uint8)
        with run.session("s").step() as step:
            step.put("token_ids", np.arange(100), start=0)
            step.put("routed_experts", experts, start=0)
        run.session("s").finalize()
        batch = run.claim(1)

        def moved(layers: range | None) -> float:
            before = bytes_read(store)
            rows = batch.fetch("routed_experts", layers=layers)["routed_experts"][0]
            np.testing.assert_array_equal(rows, experts[:, layers or range(40)])
            return bytes_read(store) - before

        assert moved(None) == experts.nbytes
        assert moved(range(20, 40)) == experts.nbytes / 2

    def test_handles_move_as_payload_does(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 4)
        batch = run.claim(4)
        handles = batch.handles("routed_experts")
        assert [one.shape for one in handles] == [(len(kept[name].tokens), 6) for name in batch.segment_ids]
        tokens = [kept[name].tokens for name in batch.segment_ids]
        layers = [9, 1, 5]
        chosen = [LAYER_IDS.index(layer) for layer in layers]
        payload = [
            np.concatenate([kept[name].experts, np.zeros((1, 6, 2), np.uint8)])[:, chosen]
            for name in batch.segment_ids
        ]

        def moved(rows: list[np.ndarray]) -> np.ndarray:
            return np.concatenate([zigzag(pad_multiple(one, 32), 0, 2) for one in reversed(rows)])

        mask = moved([np.ones(len(one), np.bool_) for one in tokens])
        mine = moved([one.astype(np.int64) for one in handles])
        got = run.resolve(mine, "routed_experts", layers, expect_tokens=moved(tokens), valid=mask)
        np.testing.assert_array_equal(got, moved(payload))
        wide = np.empty((len(mine), 3, 2), np.int32)
        assert run.resolve(mine, "routed_experts", layers, out=wide, valid=mask) is wide
        np.testing.assert_array_equal(wide, got)
        with pytest.raises(errors.Misaligned, match="all zero"):
            run.resolve(mine, "routed_experts")
        with pytest.raises(errors.Misaligned, match="position"):
            run.resolve(mine, "routed_experts", expect_tokens=moved(tokens[::-1]), valid=mask)
        with pytest.raises(errors.MalformedMessage, match="two handles added"):
            run.resolve(handles[0][:1] + handles[0][1:2], "routed_experts")

    def test_rows_shared_by_segments_are_read_once(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        tokens = np.arange(40)
        with session.step(id="root") as step:
            step.put("token_ids", tokens[:30], start=0)
        for name in ("a", "b"):
            with session.step(id=name, parent="root") as step:
                step.put("token_ids", tokens[30:] + ord(name), start=30)
        session.finalize()
        batch = run.claim(2)
        before = bytes_read(store)
        data = batch.fetch("token_ids")["token_ids"]
        for index, name in enumerate(("a", "b")):
            np.testing.assert_array_equal(data[index], [*tokens[:30], *(tokens[30:] + ord(name))])
        assert bytes_read(store) - before == 4 * 50

    def test_holes_have_handles_that_do_not_resolve(self, store: Store) -> None:
        run = open_run(store)
        with run.session("s").step(sampled=(2, 6)) as step:
            step.put("token_ids", np.arange(6), start=0)
            step.put("logprobs", np.ones(2), start=2)
        run.session("s").finalize()
        (handles,) = run.claim(1).handles("logprobs")
        assert run.resolve(handles[:4], "logprobs").tolist() == [0.0, 0.0, 1.0, 1.0]
        with pytest.raises(errors.Hole, match="row 4") as caught:
            run.resolve(handles, "logprobs")
        assert caught.value.details["rows"] == [4, 5]

    def test_awaitable_twins(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 2)
        batch = run.claim(2)

        async def all_of_them() -> None:
            (micro,) = batch.plan(max_tokens=1000)
            await run.aadd_field(fields.logprobs("old"))
            handles = await micro.ahandles("token_ids")
            got = await run.aresolve(np.concatenate(handles), "token_ids")
            want = np.concatenate([kept[name].tokens for name in micro.segment_ids])
            np.testing.assert_array_equal(got, want)
            assert await micro.aput("old", np.zeros(len(want))) == 2
            data = await micro.afetch("old")
            assert not data["old"].packed.any()
            await batch.arelease()

        asyncio.run(all_of_them())

    def test_released_and_lost_handles_are_told_apart(self, store: Store) -> None:
        run = open_run(store)
        fill(run, 1)
        batch = run.claim(1)
        (handles,) = batch.handles("token_ids")
        fetched = batch.fetch("token_ids")["token_ids"][0].tolist()
        assert run.resolve(handles, "token_ids").tolist() == fetched
        other = store.run("other", fields=[fields.token_ids()])
        with pytest.raises(errors.ChunkLost):
            other.resolve(handles, "token_ids")
        batch.release()
        with pytest.raises(errors.ChunkReleased) as caught:
            run.resolve(handles, "token_ids")
        assert caught.value.details["ids"]

    def test_a_micro_batch_is_fetched_ahead_and_errors_stay_with_theirs(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 3)
        with run.session("holed").step(sampled=(1, 2)) as step:
            step.put("token_ids", [1, 2], start=0)
        run.session("holed").finalize()
        write_rollout(run.session("last"), make_rollout(9))
        run.session("last").finalize()
        batch = run.claim(9)
        micros = [batch.select([row]) for row in range(5)]
        with batch.prefetch(micros, ["token_ids", "logprobs"], ahead_bytes=1) as ahead:
            for index, name in enumerate(kept):
                micro, data = next(ahead)
                assert micro is micros[index]
                np.testing.assert_array_equal(data["logprobs"][0], kept[name].logprobs)
            with pytest.raises(errors.Hole, match="holed"):
                next(ahead)
            micro, data = next(ahead)
            assert data["token_ids"][0].tolist() == make_rollout(9).tokens.tolist()
            assert next(ahead, None) is None
