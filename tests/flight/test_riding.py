"""Chunks written in place leave with the message that commits their step, and nothing is lost by that."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import numpy.typing as npt
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.client.commit_stream import Asked, CommitChannel, Told
from arrow_tq.client.samehost.adopter import Adopter
from arrow_tq.client.samehost.host import Host
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq_schemas.commands import Done, EndGrants
from tests.serving import Server
from tests.warm import WarmProcess

FIELDS = [fields.token_ids(), fields.routed_experts(4, 2, 200)]


@pytest.fixture
def run(store: Store, new_name: Callable[[], str]) -> Run:
    return patient(store.run(new_name(), fields=FIELDS))


def adopter(run: Run) -> Adopter:
    """Of the client's link: what was written in place waits there for a message."""
    return run.backend._link().writes.adopter  # type: ignore[attr-defined, no-any-return]


def patient(run: Run) -> Run:
    """Nothing leaves before somebody wants it."""
    adopter(run)._company.linger_s = 30.0
    return run


def experts(tokens: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 200, (tokens, 4, 2)).astype(np.int32)


def fetched(run: Run) -> npt.NDArray[np.generic]:
    batch = run.claim(1)
    got = batch.fetch("routed_experts")["routed_experts"][0].copy()
    batch.release()
    return got


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each message on a commit stream had in it, as they leave."""
    seen: list[list[str]] = []
    exchange = CommitChannel.exchange

    def noted(self: CommitChannel, asked: Sequence[Asked]) -> list[Told]:
        seen.append([one.section for one in asked])
        return exchange(self, asked)

    monkeypatch.setattr(CommitChannel, "exchange", noted)
    return seen


def test_a_trajectory_is_three_messages(run: Run, messages: list[list[str]]) -> None:
    routed = experts(100)
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.arange(101), start=0)
        step.put("routed_experts", routed, start=0)
    session.finalize()
    assert messages == [["opens"], ["adopts", "adopts", "steps"], ["finalizes"]]
    assert np.array_equal(fetched(run), routed)


def test_who_flushes_does_not_wait_for_a_commit(run: Run, messages: list[list[str]]) -> None:
    step = run.session("s").step()
    step.put("routed_experts", experts(100), start=0)
    step.flush()
    assert messages[1:] == [["adopts"]]
    step.cancel()


def test_rubbish_fails_its_own_step_alone(store: Store, run: Run) -> None:
    before = store.stats()["chunks"]
    good, bad = run.session("good").step(), run.session("bad").step()
    good.put("routed_experts", experts(100), start=0)
    bad.put("routed_experts", experts(100, 1), start=0)
    adopter(run)._queue[-1].reserved.values[...] ^= 1
    with pytest.raises(errors.MalformedMessage, match="its values do not have the checksum"):
        bad.commit()
    good.commit()
    assert store.stats()["chunks"] - before == 1
    with run.session("bad").step() as again:
        again.put("routed_experts", experts(100, 1), start=0)
    assert store.stats()["chunks"] - before == 2


def test_what_a_grant_that_ended_holds_is_sent(store: Store, run: Run) -> None:
    routed = experts(100)
    session = run.session("s")
    step = session.step()
    step.put("token_ids", np.arange(101), start=0)
    step.put("routed_experts", routed, start=0)
    mine = adopter(run)
    host: Host = mine._host
    proof = host.proof()
    assert proof is not None
    grants = sorted({one.granted.grant for one in mine._queue})
    assert host.ask(EndGrants(proof=proof, grants=grants), Done)[0].count == 2
    step.commit()
    session.finalize()
    assert np.array_equal(fetched(run), routed)


def test_a_step_that_may_not_commit_says_why(store: Store, run: Run) -> None:
    """Not that its chunks are missing: they came before it."""
    before = store.stats()["chunks"]
    session = run.session("s")
    step = session.step()
    step.put("routed_experts", experts(100), start=0)
    session.finalize()
    with pytest.raises(errors.SessionClosed):
        step.commit()
    assert store.stats()["chunks"] == before, "what it wrote was freed"


def test_a_server_that_dies_before_the_commit(tmp_path: Path) -> None:
    own = Server(tmp_path / "data", tmp_path / "memory")
    port = own.url.rpartition(":")[2]
    routed = experts(1000)
    with own, arrow_tq.connect(own.url) as store:
        run = patient(store.run("r", fields=FIELDS))
        session = run.session("s")
        step = session.step()
        step.put("token_ids", np.arange(1001), start=0)
        step.put("routed_experts", routed, start=0)
        own.kill()
        with Server(tmp_path / "data", tmp_path / "memory", "--port", port):
            step.commit()
            session.finalize()
            assert np.array_equal(fetched(run), routed)


CLIENT = """
import os, sys, numpy as np, arrow_tq
store = arrow_tq.connect(sys.argv[1])
run = store.run("r")
run.backend._link().writes.adopter._company.linger_s = 30.0
step = run.session("s").step()
step.put("token_ids", np.arange(1001), start=0)
step.put("routed_experts", np.full((1000, 4, 2), 7, np.int32), start=0)
step.commit()
other = run.session("dead").step()
other.put("routed_experts", np.full((1000, 4, 2), 7, np.int32), start=0)
os.kill(os.getpid(), 9)
"""


def test_what_was_committed_is_there_whoever_dies_next(tmp_path: Path) -> None:
    own = Server(tmp_path / "data", tmp_path / "memory")
    with own, arrow_tq.connect(own.url) as store:
        store.run("r", fields=FIELDS)
        with WarmProcess("-c", CLIENT, own.url) as client:
            assert client.wait(60) == -signal.SIGKILL
        own.kill()
    with Server(tmp_path / "data", tmp_path / "memory") as again, arrow_tq.connect(again.url) as store:
        run = store.run("r")
        assert store.stats()["chunks"] == 2, (
            "of the step that was committed; the other one's was never told of"
        )
        run.session("s").finalize()
        assert np.array_equal(fetched(run), np.full((1000, 4, 2), 7))


def test_threads_commit_what_others_messages_carried(run: Run, messages: list[list[str]]) -> None:
    """Each step's chunks are in its own message or an earlier one, whoever's that was."""
    meet = Barrier(8)

    def write(thread: int) -> None:
        meet.wait()
        for index in range(20):
            session = run.session(f"{thread}-{index}")
            with session.step() as step:
                step.put("token_ids", np.full(18, thread), start=0)
                step.put("routed_experts", experts(17, thread), start=0)
            session.finalize()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sum(sections.count("steps") for sections in messages) == 160, "none was asked for twice"
    assert not [one for one in messages if set(one) == {"adopts"}], "no message was needed for chunks alone"
    batch = run.claim(200)
    data = batch.fetch(["routed_experts"])
    for name, got in zip(batch.table["session_id"].to_pylist(), data["routed_experts"], strict=True):
        assert np.array_equal(got, experts(17, int(name.partition("-")[0])))
    batch.release()
