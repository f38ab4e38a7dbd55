"""Threads and asyncio."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from arrow_tq.interface import Store
from arrow_tq.testing.rollouts import Rollout, declared_fields, make_rollout, write_rollout
from arrow_tq.testing.scenes import chunks_stored, fill, open_run, wait_until


class ConcurrencyConformance:
    """Threads and asyncio."""

    def test_sixteen_threads_write_and_nothing_is_mixed_up(self, store: Store) -> None:
        run = open_run(store)

        def work(thread: int) -> dict[str, Rollout]:
            kept = {}
            for index in range(4):
                rollout = make_rollout(100 * thread + index)
                session = run.session(f"t{thread}-{index}")
                write_rollout(session, rollout)
                kept[session.finalize()[0].segment_id] = rollout
            return kept

        with ThreadPoolExecutor(16) as pool:
            kept = {name: rollout for part in pool.map(work, range(16)) for name, rollout in part.items()}
        batch = run.claim(1000)
        assert sorted(batch.segment_ids) == sorted(kept)
        data = batch.fetch(["token_ids", "routed_experts"])
        for index, name in enumerate(batch.segment_ids):
            np.testing.assert_array_equal(data["token_ids"][index], kept[name].tokens)
            np.testing.assert_array_equal(data["routed_experts"][index], kept[name].experts)

    def test_everything_has_an_awaitable_twin(self, store: Store) -> None:
        async def scene() -> None:
            run = await store.arun("aio", fields=declared_fields())
            rollout = make_rollout(3, turns=1)
            ((_, prompt_end, end),) = rollout.turns

            async def one(name: str) -> None:
                session = await run.asession(name)
                async with session.step(sampled=(prompt_end, end)) as step:
                    await step.put("token_ids", rollout.tokens, start=0)
                    await step.put("logprobs", rollout.logprobs[prompt_end:], start=prompt_end)
                await session.afinalize(reward=1.0)

            await asyncio.gather(*(one(f"s-{index}") for index in range(20)))
            batch = await run.aclaim(20)
            data = await batch.afetch(["token_ids", "logprobs"])
            assert len(data["token_ids"]) == 20
            for tokens in data["token_ids"]:
                np.testing.assert_array_equal(tokens, rollout.tokens)
            await batch.arelease()
            with pytest.raises(RuntimeError, match="inside"):
                async with (await run.asession("bad")).step() as step:
                    await step.put("token_ids", [1], start=0)
                    raise RuntimeError("inside")
            counts = await run.asql("SELECT count(*) AS n FROM steps")
            assert counts.column("n").to_pylist() == [20]

        asyncio.run(scene())

    def test_eight_claimers_share_without_overlap(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 24)
        taken: list[str] = []
        lock = threading.Lock()

        def work(_: int) -> None:
            while batch := run.claim(2):
                with lock:
                    taken.extend(batch.segment_ids)
                batch.release()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert sorted(taken) == sorted(kept)
        wait_until(lambda: chunks_stored(store) == 0)
