"""Commits of many threads taken together: each gets its own result, and the lead is never lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from arrow_tq.store.committing import SHARED_MAX, STEPS_MAX, Commits
from arrow_tq_schemas.commands import StepCommit, StepResult


def step(session: str, index: int) -> StepCommit:
    return StepCommit(run="r", epoch=0, session_id=session, step_id=str(index))


class Recorder:
    """A ``commit_many`` that notes its batches; it can be held up, and fail."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.fails = False
        self.go = threading.Event()
        self.go.set()

    def __call__(self, steps: Sequence[StepCommit]) -> list[StepResult]:
        assert self.go.wait(10)
        self.batches.append([one.session_id for one in steps])
        if self.fails:
            raise ConnectionError("down")
        return [StepResult(step_id=f"{one.session_id}/{one.step_id}", step_index=1) for one in steps]


def test_every_thread_gets_its_own_result() -> None:
    recorder = Recorder()
    commits = Commits(recorder)

    def work(thread: int) -> None:
        for index in range(50):
            (result,) = commits.commit([step(f"s{thread}", index)])
            assert result.step_id == f"s{thread}/{index}"

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert sum(map(len, recorder.batches)) == 800


def test_what_waits_is_one_batch_and_bounded() -> None:
    recorder = Recorder()
    commits = Commits(recorder)
    recorder.go.clear()
    count = STEPS_MAX + 5
    with ThreadPoolExecutor(count) as pool:
        done = [pool.submit(commits.commit, [step(f"s{index}", 0)]) for index in range(count)]
        until = time.monotonic() + 10
        while len(commits._waiting) < count - 1:
            assert time.monotonic() < until
            time.sleep(0.005)
        recorder.go.set()
        assert {one.result(10)[0].step_id for one in done} == {f"s{index}/0" for index in range(count)}
    assert sorted(map(len, recorder.batches)) == [1, 4, STEPS_MAX]


def test_lists_keep_their_results_and_long_ones_go_alone() -> None:
    recorder = Recorder()
    commits = Commits(recorder)
    recorder.go.clear()
    lists = {
        "long": [step(f"l{index}", index) for index in range(SHARED_MAX + 1)],
        "one session": [step("s", index) for index in range(3)],
        "first": [step("f", 0)],
        "short": [step(f"a{index}", index) for index in range(4)],
        "none": [],
    }
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(commits.commit, lists["first"])
        until = time.monotonic() + 10
        while not commits._led or commits._waiting:
            assert time.monotonic() < until
            time.sleep(0.001)
        done = {name: pool.submit(commits.commit, steps) for name, steps in lists.items() if name != "first"}
        while len(commits._waiting) < 2:
            assert time.monotonic() < until
            time.sleep(0.001)
        recorder.go.set()
        for name, results in {**done, "first": first}.items():
            wanted = [f"{one.session_id}/{one.step_id}" for one in lists[name]]
            assert [one.step_id for one in results.result(10)] == wanted
    assert sorted(map(len, recorder.batches)) == [1, 3, 4, SHARED_MAX + 1]


def test_what_fails_for_all_is_raised_by_each_and_the_next_goes_on() -> None:
    recorder = Recorder()
    commits = Commits(recorder)
    recorder.fails = True
    recorder.go.clear()
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(commits.commit, [step(f"s{index}", 0)]) for index in range(8)]
        recorder.go.set()
        for one in done:
            with pytest.raises(ConnectionError):
                one.result(10)
    recorder.fails = False
    assert [one.step_id for one in commits.commit([step("s", 1)])] == ["s/1"]


def test_an_interrupted_waiter_does_not_take_the_lead_with_it() -> None:
    recorder = Recorder()
    commits = Commits(recorder)

    def interrupt(_: int, __: FrameType | None) -> None:
        raise InterruptedError

    recorder.go.clear()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ThreadPoolExecutor(2) as pool:
            leader = pool.submit(commits.commit, [step("leader", 0)])
            until = time.monotonic() + 10
            while not commits._led or commits._waiting:
                assert time.monotonic() < until
                time.sleep(0.001)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(InterruptedError):
                commits.commit([step("interrupted", 0)])
            later = pool.submit(commits.commit, [step("later", 0)])
            recorder.go.set()
            assert leader.result(10)[0].step_id == "leader/0"
            assert later.result(10)[0].step_id == "later/0"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert recorder.batches == [["leader"], ["later"]]
