"""Claimers in processes of their own, through a real server: each segment once a task, whoever dies."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.testing.scenes import fill as fill_rollouts, open_run, wait_until
from arrow_tq_schemas.commands import FinalizeSession, OpenRun, OpenSession, StepCommit, TaskSpec
from tests.serving import Server
from tests.warm import WarmProcess

BRANCHES = 50
"""Segments of one session: steps that each begin a tree of their own."""
LEASE_S = 1.0


def fill(data_dir: Path, memory_dir: Path, segments: int) -> None:
    """That many segments without payload, written in this process: what claims are about is metadata."""
    engine = Engine(EngineConfig(data_dir=data_dir, memory_dir=memory_dir, capacity_bytes=64 << 20))
    declared = [fields.token_ids().to_json()]
    tasks = [TaskSpec(name="actor"), TaskSpec(name="critic")]
    engine.execute(OpenRun(run="demo", fields=declared, tasks=tasks))
    names = [f"s-{number:04}" for number in range(segments // BRANCHES)]
    for name in names:
        engine.execute(OpenSession(run="demo", epoch=0, session_id=name))
    for index in range(BRANCHES):
        # A step of every session at a time: they share a transaction.
        steps = [
            StepCommit(run="demo", epoch=0, session_id=name, step_id=str(index), parent="", sampled=(0, 0))
            for name in names
        ]
        assert all(result.error is None for result in engine.commit_many(steps))
    for name in names:
        engine.execute(FinalizeSession(run="demo", epoch=0, session_id=name))
    engine.close()


class Claimers:
    """Processes that claim; those that are killed are replaced."""

    def __init__(self, url: str, task: str, limit: int, folder: Path) -> None:
        self._command = ["-m", "tests.flight.claimer", url, task, str(limit), str(LEASE_S)]
        self._folder = folder
        self._folder.mkdir()
        self.running: list[WarmProcess] = []
        self._number = 0

    def start(self) -> None:
        self._number += 1
        journal = self._folder / f"{self._number}.txt"
        process = WarmProcess(*self._command, str(journal))
        self.running.append(process)

    def kill_one(self, chance: random.Random) -> bool:
        """SIGKILL one that still runs, and start another; whether there was one."""
        alive = [process for process in self.running if process.poll() is None]
        if not alive:
            return False
        victim = chance.choice(alive)
        victim.kill()
        victim.wait(30)
        self.running.remove(victim)
        self.start()
        return True

    def finish(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for process in self.running:
            assert process.wait(max(until - time.monotonic(), 0.1)) == 0

    def released(self) -> Counter[str]:
        """How often each segment's release was acked."""
        counts: Counter[str] = Counter()
        for journal in self._folder.iterdir():
            for line in journal.read_text().splitlines():
                word, *names = line.split()
                if word == "released":
                    counts.update(names)
        return counts

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.wait(30)


def claim_all(folder: Path, segments: int, processes: int, limit: int, kills: int) -> None:
    """Every segment is released exactly once for the task, though claimers are killed on the way."""
    fill(folder / "data", folder / "memory", segments)
    chance = random.Random(segments)
    with Server(folder / "data", folder / "memory") as server:
        claimers = Claimers(server.url, "actor", limit, folder / "journals")
        try:
            for _ in range(processes):
                claimers.start()
            killed = 0
            with arrow_tq.connect(server.url) as store:
                run = store.run("demo")
                for _ in range(kills):
                    time.sleep(chance.uniform(0.3, 0.8))
                    killed += claimers.kill_one(chance)
                claimers.finish(600)
                (state,) = run.sql(
                    "SELECT count(*) AS n, count(*) FILTER (WHERE status = 'ready') AS ready FROM segments"
                ).to_pylist()
                done = run.sql(
                    "SELECT sum(segments)::BIGINT AS n FROM claims WHERE state = 'done' AND task = 'actor'"
                ).to_pylist()[0]["n"]
                left = run.claim(segments, task="actor", unit="segment", wait_s=LEASE_S + 2)
                assert len(left) == 0
                assert len(run.claim(segments, task="critic", unit="segment")) == segments
        finally:
            claimers.stop()
    assert state == {"n": segments, "ready": segments}, "the critic has not trained them"
    assert done == segments, "each segment is in exactly one claim that was released"
    released = claimers.released()
    assert max(released.values()) == 1
    # A claimer may have been killed between its release and its note of it.
    assert segments - killed * limit <= len(released) <= segments


def test_a_claimer_killed_while_it_waits_takes_nothing(tmp_path: Path) -> None:
    waiter = "import sys, arrow_tq; arrow_tq.connect(sys.argv[1]).run('demo').claim(9, wait_s=25)"
    with Server(tmp_path / "data", tmp_path / "memory") as server, arrow_tq.connect(server.url) as store:
        run = open_run(store)
        process = WarmProcess("-c", waiter, server.url)
        wait_until(lambda: store.pressure().waiters == 1, 30)
        process.kill()
        process.wait(30)
        # The server hears of it from the connection, which the kernel closes.
        time.sleep(0.3)
        kept = list(fill_rollouts(run, 2))
        assert run.claim(9, wait_s=5).segment_ids == kept


def test_four_claimers_of_eight_hundred_segments_two_of_them_killed(tmp_path: Path) -> None:
    claim_all(tmp_path, 800, 4, 8, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_claimers_of_forty_thousand_segments(tmp_path: Path) -> None:
    claim_all(tmp_path, 40_000, 8, 16, kills=12)
