"""The catalog's writer: the thread that brings an operation does it, or hands it over."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.store.catalog.config import CatalogConfig
from arrow_tq.store.catalog.database import open_writer
from arrow_tq.store.catalog.waiting import Waiters
from arrow_tq.store.catalog.writer import Change, Outcome, Writer
from arrow_tq_schemas.errors import Unavailable


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    config = CatalogConfig(path=tmp_path / "catalog.sqlite")
    made = Writer(open_writer(config), config, Waiters())
    yield made
    made.close()


def whose(change: Change) -> str:
    change.execute("UPDATE state SET rev = rev")
    return threading.current_thread().name


def test_a_thread_alone_does_its_own_operations(writer: Writer) -> None:
    with ThreadPoolExecutor(1, "mine") as pool:
        outcomes = pool.submit(writer.run, [whose, whose]).result()
    assert [one.value for one in outcomes] == ["mine_0", "mine_0"]
    assert writer.rev == 1


def test_the_main_thread_never_does_them(writer: Writer) -> None:
    """An interrupt comes there, and must not end in the middle of a transaction."""
    assert threading.current_thread() is threading.main_thread()
    assert [one.value for one in writer.run([whose])] == ["arrow-tq-catalog"]


def test_threads_that_meet_are_all_served_and_share_transactions(writer: Writer) -> None:
    held, go = threading.Event(), threading.Event()

    def hold(change: Change) -> str:
        held.set()
        assert go.wait(10)
        return whose(change)

    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(writer.run, [hold])
        assert held.wait(10)
        others = [pool.submit(writer.run, [whose]) for _ in range(16)]
        until = time.monotonic() + 10
        while writer._room._value > writer._config.queue_max - 17 and time.monotonic() < until:
            time.sleep(0.01)
        go.set()
        outcomes: list[Outcome[str]] = [one for job in (first, *others) for one in job.result(10)]
    assert len(outcomes) == 17 and all(one.error is None for one in outcomes)
    assert {one.value for one in outcomes[1:]} == {"arrow-tq-catalog"}
    # The first one, what the writer took while it waited for its turn, and the rest.
    assert writer.rev <= 3


def test_closing_waits_for_who_is_at_it_and_refuses_who_comes_later(writer: Writer) -> None:
    held, go = threading.Event(), threading.Event()

    def hold(change: Change) -> str:
        held.set()
        assert go.wait(10)
        return whose(change)

    with ThreadPoolExecutor(2) as pool:
        job = pool.submit(writer.run, [hold])
        assert held.wait(10)
        closing = pool.submit(writer.close)
        go.set()
        assert job.result(10)[0].error is None
        closing.result(10)
        with pytest.raises(Unavailable):
            pool.submit(writer.run, [whose]).result(10)


def test_a_committed_step_leaves_nothing_for_the_collector(tmp_path: Path) -> None:
    """Thousands of cycles a second would have it walk the whole heap again and again."""
    with arrow_tq.open(tmp_path) as store:
        session = store.run("r", fields=[fields.token_ids()]).session("s")
        gc.collect()
        gc.disable()
        try:
            step = session.step()
            gone = weakref.ref(step)
            step.commit()
            del step
            assert gone() is None
        finally:
            gc.enable()
