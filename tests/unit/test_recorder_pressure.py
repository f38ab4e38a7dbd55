"""A store that fills up holds new rollouts back before it refuses anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from arrow_tq import errors, fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.testing.scenes import wait_until

TOKENS = 2 << 20
"""8 MiB of token ids: past the soft mark of this store."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    config = EngineConfig(
        tmp_path / "store", capacity_bytes=32 << 20, soft_mark=0.2, upkeep_period_s=0.05, orphan_ttl_s=600
    )
    with Store(Engine(config)) as store:
        yield store


@pytest.fixture
def run(store: Store) -> Run:
    return store.run("demo", fields=[fields.token_ids()])


def fill(run: Run) -> None:
    session = run.session("large")
    with session.step() as step:
        step.put("token_ids", np.zeros(TOKENS, np.int32), start=0)
    session.finalize()


def make_room(run: Run) -> None:
    batch = run.claim(1)
    assert len(batch) == 1
    batch.release()


def test_a_new_session_waits_for_room_and_is_counted(store: Store, run: Run) -> None:
    other = store.run("other", fields=[fields.token_ids()])
    open_before = other.session("open before")
    fill(run)
    assert store.pressure().fill > store.pressure().soft_mark
    with pytest.raises(errors.StoreFull, match="session 'new': the store is past its soft mark"):
        run.session("new")
    assert store.pressure().waiters == 0, "it did not wait"
    with open_before.step() as step:
        step.put("token_ids", [1, 2], start=0)
    opened = threading.Event()

    def wait() -> None:
        run.session("new", wait_s=30)
        opened.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: store.pressure().waiters == 1)
    assert store.stats()["room_waiters"] == 1
    assert not opened.is_set()
    make_room(run)
    waiter.join(20)
    assert opened.is_set()
    assert store.pressure().waiters == 0
    assert run.session("new").id == "new"


def test_a_waiter_that_gives_up_is_told_and_counted_no_more(store: Store, run: Run) -> None:
    fill(run)
    began = time.monotonic()
    with pytest.raises(errors.StoreFull, match="past its soft mark"):
        run.session("new", wait_s=0.4)
    assert 0.4 <= time.monotonic() - began < 5
    wait_until(lambda: store.pressure().waiters == 0)


def test_many_that_await_room_leave_threads_to_those_that_go_on(store: Store, run: Run) -> None:
    async def scene() -> None:
        waiting = [asyncio.create_task(run.asession(f"new-{index}", wait_s=30)) for index in range(200)]
        for _ in range(100):
            await asyncio.sleep(0.05)
            if (await store.apressure()).waiters == 200:
                break
        assert (await store.apressure()).waiters == 200
        batch = await run.aclaim(1)
        await batch.arelease()
        sessions = await asyncio.gather(*waiting)
        assert {session.id for session in sessions} == {f"new-{index}" for index in range(200)}

    fill(run)
    asyncio.run(scene())
    assert store.pressure().waiters == 0
