"""Recorders, streams, and attempts that cross each other."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from arrow_tq import errors
from arrow_tq.interface import Store
from arrow_tq.recorder import Recorder
from arrow_tq.testing.rollouts import EXPERTS, LAYERS, TOPK
from arrow_tq.testing.scenes import chunks_stored, open_run, wait_until


class WritingConformance:
    """Recorders, streams, and attempts that cross each other."""

    def test_a_recorded_response_is_attached_by_its_receipt(self, store: Store) -> None:
        run = open_run(store)
        expected = np.random.default_rng(0).integers(0, EXPERTS, (200, LAYERS, TOPK), dtype=np.int32)
        with Recorder(run, ["routed_experts"], chunk_rows=32, window_tokens=8) as recorder:
            request = recorder.begin("cmpl-1")
            request.append("routed_experts", 0, expected[:120])
            for start in range(120, 200, 4):
                request.append("routed_experts", start - 3, np.zeros((5, LAYERS, TOPK), np.int32))
                request.append("routed_experts", start - 3, expected[start - 3 : start + 4])
            receipts = request.finish(kept=190)
            assert receipts is not None
            text = receipts["routed_experts"].to_json()
            dropped = recorder.begin("cmpl-2")
            dropped.append("routed_experts", 0, expected)
            dropped.abort()
        session = run.session("s")
        with session.step(sampled=(120, 191)) as step:
            step.put("token_ids", np.arange(191), start=0)
            step.put("logprobs", np.zeros(71), start=120)
            step.attach(text)
        session.finalize()
        fetched = run.claim(1).fetch("routed_experts")["routed_experts"][0]
        np.testing.assert_array_equal(fetched, expected[:190])
        recorded = sum(step.groups for step in receipts["routed_experts"].chunks)
        wait_until(lambda: chunks_stored(store) == recorded + 2)

    def test_a_stream_replaces_rows_of_its_window(self, store: Store) -> None:
        run = open_run(store)
        run.chunk_bytes = 64
        session = run.session("s")
        with session.step(sampled=(0, 100)) as step:
            tokens, logprobs = step.stream("token_ids", window_tokens=4), step.stream("logprobs")
            for start in range(0, 99, 3):
                tokens.append(start, [start, start + 1, start + 2, -1, -1])
                logprobs.append(start, np.arange(start, start + 3, dtype=np.float32))
            tokens.append(99, [99])
            logprobs.append(99, [99.0])
            with pytest.raises(errors.InvalidInput, match=r"start 90 is below the window's floor 97"):
                tokens.append(90, [1])
            with pytest.raises(errors.RowCountMismatch, match="rows end at 101, kept is 102"):
                tokens.finish(kept=102)
            tokens.finish(kept=100)
            logprobs.finish()
            with pytest.raises(errors.Conflict, match="finished already"):
                tokens.append(100, [1])
        session.finalize()
        data = run.claim(1).fetch(["token_ids", "logprobs"])
        np.testing.assert_array_equal(data["token_ids"][0], np.arange(100))
        np.testing.assert_array_equal(data["logprobs"][0], np.arange(100, dtype=np.float32))

    def test_a_step_with_an_unfinished_stream_leaves_nothing(self, store: Store) -> None:
        run = open_run(store)
        run.chunk_bytes = 64
        session = run.session("s")
        with (
            pytest.raises(errors.Conflict, match="its stream of 'token_ids' is not finished"),
            session.step() as step,
        ):
            step.stream("token_ids").append(0, np.arange(500))
        assert run.sql("SELECT count(*) AS n FROM steps").column("n").to_pylist() == [0]
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_stream_trimmed_below_its_window_frees_the_rest(self, store: Store) -> None:
        run = open_run(store)
        run.chunk_bytes = 64
        session = run.session("s")
        with session.step() as step:
            stream = step.stream("token_ids", window_tokens=2)
            stream.append(0, np.arange(500))
            receipt = stream.finish(kept=50)
            assert receipt is not None
        (segment,) = session.finalize()
        assert segment.num_tokens == 50
        assert run.claim(1).fetch("token_ids")["token_ids"][0].tolist() == list(range(50))
        wait_until(lambda: chunks_stored(store) == len(receipt.chunks))

    def test_streams_are_awaitable(self, store: Store) -> None:
        async def scene() -> None:
            session = await run.asession("s")
            async with session.step(sampled=(0, 3)) as step:
                stream = step.stream("token_ids")
                await stream.append(0, [1, 2, 9, 9])
                await stream.append(2, [3])
                await stream.finish(kept=3)
            await session.afinalize()

        run = open_run(store)
        asyncio.run(scene())
        assert run.claim(1).fetch("token_ids")["token_ids"][0].tolist() == [1, 2, 3]

    def test_a_list_of_arrays_is_stored_as_one(self, store: Store) -> None:
        run = open_run(store)
        expected = np.random.default_rng(1).integers(0, EXPERTS, (90, LAYERS, TOPK), dtype=np.int32)
        parts = [expected[:1], expected[1:40], expected[40:40], expected[40:90]]
        session = run.session("s")
        with session.step(sampled=(0, 91)) as step:
            step.put("token_ids", [np.arange(64), np.arange(64, 91)], start=0)
            step.put("logprobs", np.zeros(91), start=0)
            receipt = step.put("routed_experts", parts, start=0)
        assert (receipt.rows, len(receipt.chunks)) == (90, 1)
        session.finalize()
        fetched = run.claim(1).fetch(["token_ids", "routed_experts"])
        np.testing.assert_array_equal(fetched["routed_experts"][0], expected)
        np.testing.assert_array_equal(fetched["token_ids"][0], np.arange(91))
        with run.session("bad").step() as step:
            parts[3] = parts[3].copy()
            parts[3][7, 0, 0] = EXPERTS
            with pytest.raises(errors.ValueOutOfRange, match=f"value {EXPERTS} at position 147"):
                step.put("routed_experts", parts, start=100)
            with pytest.raises(errors.InvalidField, match="arrays of int64 and of int32 in one put"):
                step.put("token_ids", [np.arange(2), np.arange(2, dtype=np.int32)], start=0)

    def test_receipts_that_overlap_are_refused_unless_overlay_is_meant(self, store: Store) -> None:
        run = open_run(store)
        writer = run.session("w").step()
        first = writer.put("token_ids", [1, 2, 3, 4], start=0)
        second = writer.put("token_ids", [30, 40, 50], start=2)
        writer.flush()
        with (
            pytest.raises(errors.Conflict, match=r"\[2, 5\) overlaps \[0, 4\)"),
            run.session("s").step() as step,
        ):
            step.attach(first)
            step.attach(second)
        session = run.session("s")
        with session.step() as step:
            step.attach(first)
            step.attach(second.to_json(), overlay=True)
        session.finalize()
        assert run.claim(1).fetch("token_ids")["token_ids"][0].tolist() == [1, 2, 30, 40, 50]

    def test_a_late_attempt_neither_completes_nor_deletes_its_retry(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        late, again, same = (session.step(id="call-1", sampled=(1, 3)) for _ in range(3))
        for step, last in ((late, 7), (again, 8), (same, 8)):
            step.put("token_ids", [5, 6, last], start=0)
            step.put("logprobs", [-1.0, -2.0], start=1)
            step.flush()
        again.commit()
        assert chunks_stored(store) == 6
        with pytest.raises(errors.Conflict, match="another attempt with other tokens, first at position 2"):
            late.commit()
        same.commit()
        same.cancel()
        late.cancel()
        third = session.step(id="call-1")
        third.put("token_ids", [5], start=0)
        third.cancel()
        session.finalize()
        batch = run.claim(1)
        assert batch.fetch("token_ids")["token_ids"][0].tolist() == [5, 6, 8]
        assert batch.fetch("logprobs")["logprobs"][0].tolist() == [0.0, -1.0, -2.0]

    def test_dropping_chunks_of_another_attempt_or_run_does_nothing(self, store: Store) -> None:
        run, other = open_run(store), open_run(store, "other")
        session = run.session("s")
        with session.step(id="call-1") as step:
            receipt = step.put("token_ids", [1, 2, 3], start=0)
        dropper = run.session("t").step()
        dropper.attach(receipt)
        dropper.cancel()
        foreign = other.session("t").step()
        foreign.attach(receipt, overlay=True)
        with pytest.raises(errors.InvalidInput, match="receipt of run 'demo'"):
            foreign.commit()
        session.finalize()
        assert run.claim(1).fetch("token_ids")["token_ids"][0].tolist() == [1, 2, 3]
