"""The recorder over a store that is slow, full or refuses: what waits, what fails, and for how long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from arrow_tq import Field, errors
from arrow_tq.backend import PutHandle
from arrow_tq.interface import Store
from arrow_tq.recorder import Recorder
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import chunks_stored
from arrow_tq_schemas.chunks import Chunk
from tests.unit.test_recorder import fetched, routing, run, store

__all__ = ["run", "store"]


class SlowPuts:
    """The run's backend, whose puts wait for a gate, and fail where they are told to."""

    def __init__(self, run: Run) -> None:
        self._inner = run.backend
        self.placer = None
        self.gate = threading.Event()
        self.error: errors.ArrowTQError | None = None
        self.tries = 0

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        self.gate.wait(10)
        self.tries += 1
        if self.error is not None:
            raise self.error
        return self._inner.put(field, chunks)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.fixture
def slow(run: Run) -> SlowPuts:
    run.backend = slow = SlowPuts(run)
    return slow


def test_the_scheduler_waits_for_room_and_says_how_long(run: Run, slow: SlowPuts) -> None:
    with Recorder(
        run, ["routed_experts"], chunk_rows=8, window_tokens=4, inflight_bytes_max=1 << 17
    ) as recorder:
        request = recorder.begin("r")
        threading.Timer(0.3, slow.gate.set).start()
        began = time.monotonic()
        request.append("routed_experts", 0, routing(100))
        assert time.monotonic() - began > 0.25
        receipts = request.finish()
        assert receipts is not None
        stats = recorder.stats()
        assert stats.waits >= 1
        assert 0.2 < stats.waited_s < 5
        np.testing.assert_array_equal(fetched(run, 101, receipts["routed_experts"]), routing(100))


def test_no_room_for_too_long_fails_the_request_and_no_other(run: Run, slow: SlowPuts) -> None:
    recorder = Recorder(
        run,
        ["routed_experts"],
        chunk_rows=8,
        window_tokens=4,
        inflight_bytes_max=1,
        room_wait_s=0.05,
        writers=1,
    )
    with recorder:
        one, two = recorder.begin("one"), recorder.begin("two")
        one.append("routed_experts", 0, routing(40))
        assert one.error is not None
        two.append("routed_experts", 0, routing(5))
        slow.gate.set()
        with pytest.raises(errors.DeadlineExceeded, match=r"inflight_bytes_max=1 were in flight for 0.05 s"):
            one.finish()
        assert two.finish() is not None


def test_a_failed_write_is_raised_by_its_own_request(run: Run, slow: SlowPuts, store: Store) -> None:
    slow.gate.set()
    with Recorder(run, ["routed_experts"], chunk_rows=8, window_tokens=4) as recorder:
        bad, good = recorder.begin("bad"), recorder.begin("good")
        bad.append("routed_experts", 0, routing(20))
        recorder.flush()
        slow.error = errors.StaleEpoch("run 'demo' is in epoch 1")
        bad.append("routed_experts", 20, routing(20))
        recorder.flush()
        slow.error = None
        bad.append("routed_experts", 40, routing(20))
        good.append("routed_experts", 0, routing(20))
        with pytest.raises(errors.StaleEpoch, match="epoch 1"):
            bad.finish()
        receipts = good.finish()
        assert receipts is not None
        recorder.flush()
        assert recorder.stats().failed >= 1
        assert chunks_stored(store) == 2 * len(receipts["routed_experts"].chunks), "the bad one's are freed"


def test_a_full_store_is_waited_for(run: Run, slow: SlowPuts) -> None:
    slow.gate.set()
    slow.error = errors.StoreFull("no room")
    with Recorder(run, ["routed_experts"], chunk_rows=8, window_tokens=4) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, routing(20))
        threading.Timer(0.3, setattr, (slow, "error", None)).start()
        receipts = request.finish()
        assert receipts is not None
        assert recorder.stats().retries >= 1
        np.testing.assert_array_equal(fetched(run, 21, receipts["routed_experts"]), routing(20))
    slow.error = errors.StoreFull("no room")
    with Recorder(run, ["routed_experts"], store_wait_s=0.1) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, routing(20))
        with pytest.raises(errors.StoreFull, match="no room"):
            request.finish()
        slow.error = None


def test_finishing_can_be_awaited(run: Run, slow: SlowPuts) -> None:
    async def scene() -> None:
        request = recorder.begin("r")
        request.append("routed_experts", 0, routing(20))
        future = request.finish_soon()
        assert not future.done()
        slow.gate.set()
        receipts = await asyncio.wrap_future(future)
        assert receipts is not None
        assert receipts["routed_experts"].rows == 20

    with Recorder(run, ["routed_experts"]) as recorder:
        asyncio.run(scene())


def test_a_finish_that_takes_too_long_aborts(run: Run, slow: SlowPuts, store: Store) -> None:
    with Recorder(run, ["routed_experts"]) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, routing(20))
        with pytest.raises(errors.DeadlineExceeded, match=r"request 'r': not stored within 0.05 s"):
            request.finish(timeout_s=0.05)
        slow.gate.set()
        recorder.flush()
        assert chunks_stored(store) == 0
