"""Shards that are killed, stopped and restarted under load, one after the other; a catalog that restarts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field as slot
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.runs import Run
from tests.cluster.living import Living
from tests.clusters import Cluster

TURN, STEPS = 8, 4
TYPED_S = 15.0
"""Bound of "within seconds" on a machine under load: a lease, a look at the map, and then some."""
AWAY_ROUNDS = 5
"""Of reads from the dead and commits on the living: what piles up in these is seen."""


def tokens_of(session: str, step: int) -> np.ndarray:
    return np.random.default_rng([*session.encode(), step]).integers(0, 1 << 20, TURN, dtype=np.int32)


@dataclass
class Load:
    """Writers that go on through every fault: what was acked to them, kept outside of the cluster."""

    url: str
    stop: threading.Event = slot(default_factory=threading.Event)
    acked: dict[str, list[int]] = slot(default_factory=dict)
    refused: int = 0
    lock: threading.Lock = slot(default_factory=threading.Lock)
    wrong: list[BaseException] = slot(default_factory=list)

    def start(self, writers: int = 2) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.write, args=(f"w{one}",)) for one in range(writers)]
        for thread in threads:
            thread.start()
        return threads

    def write(self, prefix: str) -> None:
        try:
            with arrow_tq.connect(self.url) as store:
                run = store.run("load")
                number = 0
                while not self.stop.is_set():
                    self.session(run, f"{prefix}-{number}")
                    number += 1
        except BaseException as error:
            self.wrong.append(error)
            raise

    def session(self, run: Run, name: str) -> None:
        session = run.session(name)
        for index in range(STEPS):
            while not self.stop.is_set():
                try:
                    with session.step(id=str(index), sampled=(index * TURN, (index + 1) * TURN)) as step:
                        step.put("token_ids", tokens_of(name, index), start=index * TURN)
                except (errors.Unavailable, errors.DeadlineExceeded):
                    # Its shard is away: once more, on another.
                    with self.lock:
                        self.refused += 1
                    time.sleep(0.05)
                else:
                    with self.lock:
                        self.acked.setdefault(name, []).append(index)
                    break

    def count(self) -> int:
        with self.lock:
            return sum(map(len, self.acked.values()))

    def goes_on(self, timeout_s: float = 60.0) -> None:
        """Return when more was acked than at the call."""
        before, end = self.count(), time.monotonic() + timeout_s
        while self.count() < before + 3:
            assert not self.wrong, self.wrong
            assert time.monotonic() < end, "writers do not go on"
            time.sleep(0.05)


def stored(run: Run, session: str) -> dict[int, list[str]]:
    """Chunk ids of a session by shard."""
    rows = run.sql(f"SELECT shard, chunk_id FROM chunks WHERE session_id = '{session}'").to_pylist()
    found: dict[int, list[str]] = {}
    for row in rows:
        found.setdefault(row["shard"], []).append(row["chunk_id"])
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 2) as running:
        yield running


def spread_session(run: Run, name: str, numbers: list[int]) -> None:
    """One step a shard, finalized."""
    session = run.session(name)
    for index, number in enumerate(numbers):
        session.pin_shard(number)
        with session.step(id=str(index), sampled=(index * TURN, (index + 1) * TURN)) as step:
            step.put("token_ids", tokens_of(name, index), start=index * TURN)
    session.finalize()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["kill", "stop"]
)
def test_each_shard_in_turn_goes_away_and_comes_back(cluster: Cluster, fault: signal.Signals) -> None:
    with arrow_tq.connect(cluster.url) as store:
        run = store.run("load", fields=[fields.token_ids()])
        numbers = [cluster.number(index) for index in range(2)]
        for number in numbers:
            spread_session(run, f"on-{number}", [number])
        spread_session(run, "on-both", numbers)
        load = Load(cluster.url)
        threads = load.start()
        try:
            load.goes_on()
            for index, number in enumerate(numbers):
                server, (other,) = cluster.shards[index], [one for one in numbers if one != number]
                with Living([cluster.catalog, cluster.shards[1 - index]]):
                    server.process.send_signal(fault)
                    # Of the living shard nothing is touched, and nobody waits for the other.
                    check_session(run, f"on-{other}", [0])
                    check_dead(run, number)
                    for _ in range(AWAY_ROUNDS):
                        check_dead(run, number)
                        load.goes_on()
                if fault == signal.SIGKILL:
                    server.process.wait(30)
                    server.__exit__(None, None, None)
                    cluster.start_shard(index)
                else:
                    os.kill(server.pid, signal.SIGCONT)
                readable_again(run, f"on-{number}")
                check_session(run, f"on-{number}", [0])
                check_session(run, "on-both", [0, 1])
                load.goes_on()
        finally:
            load.stop.set()
            for thread in threads:
                thread.join(120)
        assert not load.wrong
        check_acked(run, load)


def check_session(run: Run, name: str, steps: list[int]) -> None:
    column = run.table([name], fields=["token_ids"])["token_ids"]
    np.testing.assert_array_equal(
        np.asarray(column[0].as_py(), np.int32), np.concatenate([tokens_of(name, step) for step in steps])
    )


def readable_again(run: Run, name: str, timeout_s: float = 60.0) -> None:
    """Until its shard is back, a read says pending and nothing else."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            run.table([name], fields=["token_ids"])
        except errors.ChunkPending:
            assert time.monotonic() < end
            time.sleep(0.1)
        else:
            return


def check_dead(run: Run, number: int) -> None:
    """Typed, within seconds, naming the shard and exactly the chunks that were asked of it."""
    for session in (f"on-{number}", "on-both"):
        expected = stored(run, session)[number]
        began = time.monotonic()
        with pytest.raises(errors.ChunkPending, match=f"shard {number} at ") as caught:
            run.table([session], fields=["token_ids"])
        assert time.monotonic() - began < TYPED_S
        assert caught.value.details["ids"] == expected
        assert caught.value.details["shard"] == number
        assert caught.value.retryable


def check_acked(run: Run, load: Load) -> None:
    """Every acked step is there, bit by bit."""
    for name in load.acked:
        run.session(name).finalize()
    names = sorted(load.acked)
    table = run.table([f"{name}~0" for name in names], fields=["token_ids"])
    for name, tokens in zip(names, table["token_ids"].to_pylist(), strict=True):
        steps = load.acked[name]
        assert steps == list(range(len(steps)))
        found = np.asarray(tokens, np.int32)
        np.testing.assert_array_equal(
            found[: len(steps) * TURN], np.concatenate([tokens_of(name, one) for one in steps])
        )


@pytest.mark.timeout(300)
def test_the_catalog_restarts_and_everybody_goes_on(cluster: Cluster) -> None:
    with arrow_tq.connect(cluster.url) as store:
        run = store.run("load", fields=[fields.token_ids()])
        numbers = [cluster.number(index) for index in range(2)]
        spread_session(run, "before", numbers)
        load = Load(cluster.url)
        threads = load.start()
        try:
            for _ in range(2):
                load.goes_on()
                refused = load.refused
                epochs = {one.number: one.epoch for one in cluster.map().shards}
                cluster.catalog.kill()
                time.sleep(0.5)
                cluster.start_catalog()
                # The same client, the same call: it waited. The shards never left.
                check_session(run, "before", [0, 1])
                found = cluster.wait()
                assert {one.number: one.epoch for one in found.shards} == epochs
                load.goes_on()
                assert load.refused - refused <= 4, "writers were refused instead of waiting"
        finally:
            load.stop.set()
            for thread in threads:
                thread.join(120)
        assert not load.wrong
        check_acked(run, load)
