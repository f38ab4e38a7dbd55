"""Many sessions that are live at one time, from threads and from asyncio, each with a branch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq.producer.session import Session
from arrow_tq.runs import Run

FIELDS = [fields.token_ids(), fields.routed_experts(layers=2, topk=2, num_experts=16)]
BOUND_S = 150.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


def tokens_of(number: int, step: int) -> np.ndarray:
    return np.arange(4, dtype=np.int32) + 100 * number + 10 * step


def experts_of(number: int, step: int) -> np.ndarray:
    return np.full((4, 2, 2), (number + step) % 16, np.int32)


PLAN = (("root", "", 0), ("left", "root", 4), ("right", "root", 4), ("on", "right", 8))
"""Steps of each session: id, parent, start."""
PATHS = (("root", "left"), ("root", "right", "on"))


def write(session: Session, number: int, index: int) -> None:
    name, parent, start = PLAN[index]
    with session.step(id=name, parent=parent, sampled=(start, start + 4), version=str(index)) as step:
        step.put("token_ids", tokens_of(number, index), start=start)
        step.put("routed_experts", experts_of(number, index), start=start)


def check(run: Run, sessions: int, aborted: int) -> None:
    """Every session that was not aborted has both branches, each with its own values."""
    place = {name: index for index, (name, _, _) in enumerate(PLAN)}
    seen = 0
    while batch := run.claim(512):
        data = batch.fetch(["token_ids", "routed_experts"])
        rows = zip(
            *(batch.table.column(name).to_pylist() for name in ("session_id", "segment_index")), strict=True
        )
        for row, (session_id, index) in enumerate(rows):
            number = int(session_id)
            steps = [place[name] for name in PATHS[index]]
            wanted = np.concatenate([tokens_of(number, step) for step in steps])
            np.testing.assert_array_equal(data["token_ids"][row], wanted)
            routing = np.concatenate([experts_of(number, step) for step in steps])[:-1]
            np.testing.assert_array_equal(data["routed_experts"][row], routing)
            seen += 1
        batch.release()
    assert seen == len(PATHS) * (sessions - aborted)
    counts = run.sql("SELECT status, count(*) AS n FROM sessions GROUP BY status ORDER BY status").to_pylist()
    assert {row["status"]: row["n"] for row in counts} == {
        "aborted": aborted,
        "finalized": sessions - aborted,
    }
    losses = run.sql("SELECT DISTINCT sum(loss_tokens) AS n FROM segments GROUP BY session_id").to_pylist()
    assert [row["n"] for row in losses] == [4 * len(PLAN)]


sizes = pytest.mark.parametrize(
    "sessions", [192, pytest.param(4096, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)


@sizes
def test_sessions_live_from_64_threads(store: Store, sessions: int) -> None:
    run, threads, begun = store.run("live", fields=FIELDS), 64, time.monotonic()
    together = threading.Barrier(threads)

    def work(thread: int) -> None:
        numbers = range(thread, sessions, threads)
        open_ = {number: run.session(str(number)) for number in numbers}
        together.wait()
        if thread == 0:
            assert store.pressure().open_sessions == sessions
        for index in range(len(PLAN)):
            for number, session in open_.items():
                write(session, number, index)
        together.wait()
        for number, session in open_.items():
            if number % 16 == 0:
                session.abort()
            else:
                assert len(session.finalize()) == len(PATHS)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    check(run, sessions, len(range(0, sessions, 16)))
    assert store.stats()["chunks"] == 0
    assert time.monotonic() - begun < BOUND_S


@sizes
def test_sessions_live_from_asyncio(store: Store, sessions: int) -> None:
    run, begun = store.run("live", fields=FIELDS), time.monotonic()

    async def write_all(session: Session, number: int) -> None:
        for index, (name, parent, start) in enumerate(PLAN):
            async with session.step(id=name, parent=parent, sampled=(start, start + 4)) as step:
                await step.put("token_ids", tokens_of(number, index), start=start)
                await step.put("routed_experts", experts_of(number, index), start=start)

    async def scene() -> None:
        live = await asyncio.gather(*(run.asession(str(number)) for number in range(sessions)))
        assert len(live) == sessions
        assert store.pressure().open_sessions == sessions
        await asyncio.gather(*(write_all(session, number) for number, session in enumerate(live)))
        ends = (
            session.aabort() if number % 16 == 0 else session.afinalize()
            for number, session in enumerate(live)
        )
        await asyncio.gather(*ends)

    asyncio.run(scene())
    check(run, sessions, len(range(0, sessions, 16)))
    assert store.stats()["chunks"] == 0
    assert time.monotonic() - begun < BOUND_S
