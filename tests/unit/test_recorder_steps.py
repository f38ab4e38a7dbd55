"""Puts of a step that travel in the background: a failure belongs to its own step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import chunks_stored
from arrow_tq_schemas.chunks import Chunk


class Later:
    """A put that is done in the background, or fails there."""

    def __init__(self, work: threading.Thread, errors_: list[errors.ArrowTQError]) -> None:
        self._work = work
        self._errors = errors_

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.join(timeout_s)
        if self._errors:
            raise self._errors[0]


class Background:
    """The run's backend with puts that travel for a while, as over a network."""

    def __init__(self, run: Run, seconds: float) -> None:
        self._inner = run.backend
        self._seconds = seconds
        self.puts_in_background = True
        self.placer = None
        self.error: errors.ArrowTQError | None = None

    def put(self, field: Field, chunks: Sequence[Chunk]) -> Later:
        failure, found = self.error, []

        def work() -> None:
            time.sleep(self._seconds)
            if failure is None:
                self._inner.put(field, chunks)
            else:
                found.append(failure)

        thread = threading.Thread(target=work)
        thread.start()
        return Later(thread, found)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


@pytest.fixture
def run(store: Store) -> Run:
    return store.run("demo", fields=[fields.token_ids(), fields.logprobs()])


def test_a_failed_put_is_raised_by_its_own_step_and_no_later_one(store: Store, run: Run) -> None:
    run.backend = backend = Background(run, 0.1)
    session = run.session("s")
    with pytest.raises(errors.StoreFull, match="no room"), session.step(id="bad", sampled=(0, 2)) as step:
        step.put("token_ids", [1, 2], start=0)
        backend.error = errors.StoreFull("no room")
        step.put("logprobs", [-1.0, -2.0], start=0)
        backend.error = None
    assert chunks_stored(store) == 0, "what the step had stored is freed"
    with session.step(id="good", sampled=(0, 2)) as step:
        step.put("token_ids", [3, 4], start=0)
        step.put("logprobs", [-1.0, -2.0], start=0)
    assert run.sql("SELECT step_id FROM steps").column(0).to_pylist() == ["good"]
    assert chunks_stored(store) == 2


def test_flush_raises_it_earlier(run: Run) -> None:
    run.backend = backend = Background(run, 0.0)
    backend.error = errors.StoreFull("no room")
    step = run.session("s").step()
    step.put("token_ids", [1], start=0)
    with pytest.raises(errors.StoreFull, match="no room"):
        step.flush()
    step.cancel()


def test_a_streams_failed_put_is_raised_by_its_step(store: Store, run: Run) -> None:
    run.backend = backend = Background(run, 0.0)
    run.chunk_bytes = 64
    with pytest.raises(errors.StoreFull, match="no room"), run.session("s").step() as step:
        stream = step.stream("token_ids", window_tokens=2)
        stream.append(0, np.arange(100))
        backend.error = errors.StoreFull("no room")
        stream.append(100, np.arange(100))
        backend.error = None
        stream.finish()
    assert chunks_stored(store) == 0


def test_awaiting_a_put_leaves_the_loop_free(run: Run) -> None:
    async def scene() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        async with run.session("s").step() as step:
            await step.put("token_ids", np.zeros(5 << 20, np.int32), start=0)
        ticker.cancel()
        return ticks

    run.backend = Background(run, 0.5)
    assert asyncio.run(scene()) > 10
