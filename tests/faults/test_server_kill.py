"""SIGKILL of the server at random moments of a write load, against a journal kept outside of it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field as slot
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.runs import Run
from tests.serving import Server

WRITERS = 4
LAYERS, TOPK = 4, 2
TURN = 8
"""Tokens that each step adds."""


def tokens_of(session: str, step: int) -> np.ndarray:
    return np.random.default_rng([*session.encode(), step]).integers(0, 1 << 20, TURN, dtype=np.int32)


def experts_of(session: str, step: int) -> np.ndarray:
    """Routing of a step's tokens; a session's very last row is left out where it is read."""
    seed = [*session.encode(), step, 1]
    return np.random.default_rng(seed).integers(0, 256, (TURN, LAYERS, TOPK), dtype=np.uint8)


@dataclass
class Journal:
    """What writers tried, and the steps that were acked to them, in that order. Kept outside the server."""

    opened: list[str] = slot(default_factory=list)
    acked: dict[str, list[int]] = slot(default_factory=dict)
    lock: threading.Lock = slot(default_factory=threading.Lock)

    def note(self, session: str, step: int | None = None) -> None:
        with self.lock:
            if step is None:
                self.opened.append(session)
            else:
                self.acked.setdefault(session, []).append(step)


def write(url: str, prefix: str, journal: Journal, stop: threading.Event) -> None:
    """Write sessions of up to five steps until the server goes away."""
    try:
        with arrow_tq.connect(url) as store:
            run = store.run("load")
            number = 0
            while not stop.is_set():
                name = f"{prefix}-{number}"
                number += 1
                journal.note(name)
                session = run.session(name)
                for index in range(5):
                    start = index * TURN
                    with session.step(id=str(index), sampled=(start, start + TURN)) as step:
                        step.put("token_ids", tokens_of(name, index), start=start)
                        step.put("routed_experts", experts_of(name, index), start=start)
                    journal.note(name, index)
    except (errors.Unavailable, errors.DeadlineExceeded):
        return


def check(run: Run, journal: Journal) -> int:
    """Every acked step is there, and what is there is whole steps, bit by bit; gives how many were acked."""
    for session in journal.opened:
        run.session(session).finalize()
    batch = run.claim(100_000)
    names = batch.table.column("session_id").to_pylist()
    assert set(journal.acked) <= set(names) <= set(journal.opened)
    if len(batch):
        data = batch.fetch(["token_ids", "routed_experts"])
        for index, session in enumerate(names):
            steps, half = divmod(len(data["token_ids"][index]), TURN)
            assert not half, f"{session}: half a step"
            acked = journal.acked.get(session, [])
            assert acked == list(range(len(acked))), f"{session}: acked out of order"
            assert steps >= len(acked), f"{session}: {len(acked)} steps were acked, {steps} are stored"
            tokens = np.concatenate([tokens_of(session, step) for step in range(steps)])
            experts = np.concatenate([experts_of(session, step) for step in range(steps)])
            np.testing.assert_array_equal(data["token_ids"][index], tokens)
            np.testing.assert_array_equal(data["routed_experts"][index], experts[:-1])
    batch.release()
    return sum(map(len, journal.acked.values()))


def load(url: str, server: Server, prefix: str, seconds: float) -> Journal:
    """Write from several threads, kill the server in the middle, and wait for the writers to notice."""
    journal = Journal()
    stop = threading.Event()
    writers = [
        threading.Thread(target=write, args=(url, f"{prefix}w{writer}", journal, stop))
        for writer in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    time.sleep(seconds)
    server.kill()
    stop.set()
    for writer in writers:
        writer.join(60)
        assert not writer.is_alive(), "a writer hangs after its server was killed"
    return journal


def kill_rounds(folder: Path, rounds: int, durability: str) -> None:
    """Each round's server recovers what the one before left, is checked, loaded, and killed in turn."""
    chance = random.Random(rounds)
    declared = [fields.token_ids(), fields.routed_experts(LAYERS, TOPK)]
    journal: Journal | None = None
    acked = 0
    for number in range(rounds + 1):
        with Server(folder / "data", folder / "memory") as server:
            with arrow_tq.connect(server.url) as store:
                run = store.run("load", fields=declared, durability=durability)
                if journal is not None:
                    acked += check(run, journal)
                if number == rounds:
                    (row,) = run.sql("SELECT count(*) AS steps FROM steps").to_pylist()
                    assert row["steps"] >= acked
                    break
            journal = load(server.url, server, f"r{number}", chance.uniform(0.1, 0.5))
    assert acked > rounds, "the load never got going"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("durability", ["process"])
def test_no_acked_step_is_lost_and_none_is_half_there(tmp_path: Path, durability: str) -> None:
    kill_rounds(tmp_path, 6, durability)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("durability", ["process", "disk"])
def test_two_hundred_kills(tmp_path: Path, durability: str) -> None:
    kill_rounds(tmp_path, 200, durability)
