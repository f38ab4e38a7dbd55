"""Engines that fail, agents that leave, stores that are down: what is left is whole steps, or nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import arrow_tq
from arrow_tq import fields
from tests.proxy import processes
from tests.proxy.agents import RECORDED, check_segments, events, finalize, generate, named, sampled, steps_of
from tests.proxy.conftest import RUN, SIZES, Lab, started
from tests.proxy.processes import ROOT, Process
from tests.serving import Server

NewSession = Callable[[], str]
PROMPT = list(b"A prompt of some tokens")


@pytest.fixture(scope="module")
def hasty(lab: Lab) -> Iterator[Process]:
    """A proxy that waits one second for its engine."""
    arguments = [word for name in ("response_s=1", "call_s=20") for word in ("--set", name)]
    with started(lab, "hasty", "/sglang", *arguments) as proxy:
        yield proxy
        assert proxy.stop() == 0


def test_the_engines_own_failure_is_handed_back(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    response = generate(sglang.url, session, PROMPT, "one", fault="500")
    assert (response.status_code, response.json()) == (500, {"error": "out of memory"})
    assert response.headers["x-engine"] == "broken" and response.headers[RECORDED] == "no"
    assert steps_of(lab.run, session) == []
    # The same call again is a new attempt, under its own name.
    assert generate(sglang.url, session, PROMPT, "one").json()["arrow_tq"]["step"] == "one"


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("truncate", 502, "unreachable"),
        ("more-rows", 502, "row-count-mismatch"),
        ("hang", 504, "deadline-exceeded"),
    ],
)
def test_an_answer_that_cannot_be_recorded_leaves_nothing(
    lab: Lab, hasty: Process, new_session: NewSession, fault: str, status: int, code: str
) -> None:
    session = new_session()
    response = generate(hasty.url, session, PROMPT, "one", fault=fault)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers[RECORDED] == "no"
    assert steps_of(lab.run, session) == []
    sampled(generate(hasty.url, session, PROMPT, "one"))
    finalize(hasty.url, session)
    (row,) = check_segments(lab.run, session)
    assert len(row["loss"]) == 12


def test_an_engine_that_ignores_the_start(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    one = sampled(generate(sglang.url, session, PROMPT, "one"))
    prompt = [*PROMPT, *one, *b" more"]
    response = generate(sglang.url, session, prompt, "two", fault="ignore-start")
    assert response.status_code == 502 and "ignored" in response.json()["error"]["message"]
    with started(lab, "lenient", "/sglang", "--set", "row_rule=ignores-start") as proxy:
        assert generate(proxy.url, session, prompt, "two", fault="ignore-start").status_code == 200
        finalize(proxy.url, session)
    check_segments(lab.run, session)


def test_an_aborted_call_is_recorded_and_its_routing_comes_with_the_next(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    aborted = generate(sglang.url, session, PROMPT, "one", fault="abort").json()
    assert aborted["meta_info"]["finish_reason"] == {"type": "abort"}
    assert "routed_experts" not in aborted["arrow_tq"]["fields"]
    again = generate(sglang.url, session, PROMPT, "two").json()
    assert again["arrow_tq"]["fields"]["routed_experts"]["start"] == 0
    finalize(sglang.url, session)
    (row,) = check_segments(lab.run, session)
    assert row["token_ids"] == [*PROMPT, *again["output_ids"]]


def test_a_stream_that_breaks_off_ends_with_an_error_and_no_step(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    response = generate(
        sglang.url, session, PROMPT, "one", fault="drop", stream=True, sampling_params={"max_new_tokens": 60}
    )
    assert b"[DONE]" not in response.content
    assert response.text.strip().split("\n\n")[-1].startswith('data: {"error": {"type": "arrow_tq"')
    assert steps_of(lab.run, session) == []
    again = generate(sglang.url, session, PROMPT, "one", stream=True)
    assert events(again.content)[-1]["arrow_tq"]["step"] == "one"


def test_an_agent_that_leaves_mid_stream_leaves_no_step(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    gone = httpx.get(f"{lab.upstream.url}/seen").json()["disconnects"]
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 80}, "stream": True}
    headers = named(session, "one", pace="0.1")
    with httpx.stream("POST", f"{sglang.url}/generate", json=body, headers=headers, timeout=30) as response:
        next(response.iter_lines())
    until = time.monotonic() + 10
    while httpx.get(f"{lab.upstream.url}/seen").json()["disconnects"] == gone and time.monotonic() < until:
        time.sleep(0.05)
    # The engine was told: it need not go on.
    assert httpx.get(f"{lab.upstream.url}/seen").json()["disconnects"] == gone + 1
    assert httpx.get(f"{sglang.url}/arrow-tq/sessions/{session}").json()["calls_under_way"] == 0
    assert steps_of(lab.run, session) == []
    assert generate(sglang.url, session, PROMPT, "one").status_code == 200


def test_an_agent_that_leaves_before_its_answer(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    with pytest.raises(httpx.ReadTimeout):
        headers = named(session, "one", fault="hang")
        httpx.post(f"{sglang.url}/generate", json={"input_ids": PROMPT}, headers=headers, timeout=0.3)
    until = time.monotonic() + 10
    url = f"{sglang.url}/arrow-tq/sessions/{session}"
    while httpx.get(url).json()["calls_under_way"] and time.monotonic() < until:
        time.sleep(0.05)
    assert httpx.get(url).json()["calls_under_way"] == 0
    assert generate(sglang.url, session, PROMPT, "one").status_code == 200


def test_bodies_past_their_bounds_and_calls_without_a_session_are_refused(
    lab: Lab, new_session: NewSession
) -> None:
    bounds = ["--set", "request_bytes_max=100000", "--set", "response_bytes_max=1048576"]
    bounds += ["--set", "on_no_session=refuse"]
    with started(lab, "bounded", "/sglang", *bounds) as proxy:
        nameless = httpx.post(f"{proxy.url}/generate", json={"input_ids": [65]})
        assert nameless.status_code == 400 and "x-arrow-tq-session" in nameless.text
        assert httpx.get(f"{proxy.url}/anything").status_code == 207
        response = generate(proxy.url, new_session(), [65] * 50_000)
        assert (response.status_code, response.json()["error"]["details"]) == (413, {"bytes_max": 100_000})
        session = new_session()
        for stream in (False, True):
            # The routing of a long prompt alone is more.
            response = generate(proxy.url, session, [65] * 13_000, "one", stream=stream)
            assert response.status_code == (200 if stream else 502)
            assert "1048576 bytes" in response.text and b"[DONE]" not in response.content
        assert steps_of(lab.run, session) == []


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Server, Callable[[str], Process]]]:
    """A store of the test's own, which it may kill, and proxies in front of it."""
    running: list[Process] = []
    with (
        Server(tmp_path / "data", tmp_path / "memory") as server,
        processes.upstream(tmp_path / "upstream.log") as upstream,
    ):
        with arrow_tq.connect(server.url) as store:
            routing = fields.routed_experts(layers=SIZES.layers, topk=SIZES.topk, num_experts=SIZES.experts)
            store.run(RUN, fields=[fields.token_ids(), fields.logprobs(), routing])

        def proxy(policy: str) -> Process:
            arguments = ["--on-store-failure", policy, "--set", "store_s=3", "--set", "connect_s=2"]
            log = tmp_path / f"{policy}.log"
            running.append(processes.proxy(log, f"{upstream.url}/sglang", server.url, RUN, *arguments))
            return running[-1]

        yield server, proxy
        for one in running:
            with one:
                assert one.stop() == 0


def test_a_store_that_is_down(alone: tuple[Server, Callable[[str], Process]], tmp_path: Path) -> None:
    server, proxy = alone
    failing, passing = proxy("fail"), proxy("pass")
    one = sampled(generate(failing.url, "s-fail", PROMPT, "one"))
    before = sampled(generate(passing.url, "s-pass", PROMPT, "one"))
    server.kill()

    # Refused, typed, and said to be worth another try.
    refused = generate(failing.url, "s-fail", [*PROMPT, *one, 66], "two")
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["retryable"] is True and refused.headers[RECORDED] == "no"
    assert generate(failing.url, "s-new", PROMPT).status_code == 503
    streamed = generate(failing.url, "s-fail", [*PROMPT, *one, 66], "two", stream=True)
    assert b"[DONE]" not in streamed.content and b'"retryable": true' in streamed.content

    # Passed, and said to be unrecorded: in a session that is open, and in one that cannot be opened.
    missed = generate(passing.url, "s-pass", [*PROMPT, *before, 66], "two")
    assert missed.status_code == 200 and missed.headers[RECORDED] == "no"
    assert "arrow_tq" not in missed.json() and "routed_experts" not in missed.json()["meta_info"]
    unopened = generate(passing.url, "s-new", PROMPT)
    assert unopened.status_code == 200 and unopened.headers[RECORDED] == "no"
    told = events(generate(passing.url, "s-pass", [*PROMPT, *before, 66], "two", stream=True).content)[-1]
    assert told["arrow_tq"]["recorded"] is False and told["arrow_tq"]["error"]["retryable"] is True
    for one_proxy, policy in ((failing, "fail"), (passing, "pass")):
        metrics = httpx.get(f"{one_proxy.url}/arrow-tq/metrics").text
        count = next(
            line for line in metrics.splitlines() if f'store_failures_total{{policy="{policy}"}}' in line
        )
        assert float(count.split()[-1]) == 3
    assert "goes unrecorded" in passing.log.read_text()

    # Back again: calls are recorded, what was missed is covered as context, without loss.
    again = ["--port", server.url.rsplit(":", 1)[1]]
    with (
        Server(server.data_dir, server.memory_dir, *again) as revived,
        arrow_tq.connect(revived.url) as store,
    ):
        run = store.run(RUN)
        two = sampled(generate(failing.url, "s-fail", [*PROMPT, *one, 66], "two"))
        seen = missed.json()["output_ids"]
        last = sampled(generate(passing.url, "s-pass", [*PROMPT, *before, 66, *seen, 67], "three"))
        finalize(failing.url, "s-fail")
        finalize(passing.url, "s-pass")
        (row,) = check_segments(run, "s-fail")
        assert row["token_ids"] == [*PROMPT, *one, 66, *two] and len(row["loss"]) == 24
        (row,) = check_segments(run, "s-pass")
        assert row["token_ids"] == [*PROMPT, *before, 66, *seen, 67, *last] and len(row["loss"]) == 24


@pytest.mark.slow
def test_a_proxy_that_starts_before_its_store(lab: Lab, tmp_path: Path) -> None:
    """It listens, says that it is not ready, and is when the store comes."""
    folder = tmp_path / "later"
    with Server(folder / "data", folder / "memory") as server:
        port = server.url.rsplit(":", 1)[1]
        assert server.stop() == 0
    declared = [
        "--set",
        "declare_layers=4",
        "--set",
        "declare_topk=4",
        "--set",
        "declare_experts=64",
        "--set",
        "connect_s=1",
    ]
    upstream = f"{lab.upstream.url}/sglang"
    with processes.proxy(
        tmp_path / "early.log", upstream, f"grpc://127.0.0.1:{port}", "new", *declared
    ) as proxy:
        assert httpx.get(f"{proxy.url}/arrow-tq/readyz", timeout=30).status_code == 503
        assert httpx.get(f"{proxy.url}/arrow-tq/livez").status_code == 200
        with Server(folder / "data", folder / "memory", "--port", port) as server:
            until = time.monotonic() + 20
            while httpx.get(f"{proxy.url}/arrow-tq/readyz", timeout=30).status_code != 200:
                assert time.monotonic() < until
                time.sleep(0.2)
            # It declared the run by itself.
            sampled(generate(proxy.url, "s", PROMPT))
            finalize(proxy.url, "s")
            with arrow_tq.connect(server.url) as store:
                check_segments(store.run("new"), "s")
            assert proxy.stop() == 0


def test_a_store_in_a_folder_of_the_proxys_own(lab: Lab, tmp_path: Path) -> None:
    declared = ["--set", "declare_layers=4", "--set", "declare_topk=4", "--set", "declare_experts=64"]
    folder = tmp_path / "store"
    upstream = f"{lab.upstream.url}/sglang"
    with processes.proxy(tmp_path / "own.log", upstream, str(folder), "own", *declared) as proxy:
        sampled(generate(proxy.url, "s", PROMPT))
        finalize(proxy.url, "s")
        assert proxy.stop() == 0
    with arrow_tq.open(folder) as store:
        check_segments(store.run("own"), "s")


def test_sigterm_lets_calls_finish(lab: Lab, new_session: NewSession) -> None:
    session = new_session()
    with started(lab, "leaving", "/sglang") as proxy:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 24}, "stream": True}
        with httpx.stream(
            "POST", f"{proxy.url}/generate", json=body, headers=named(session, "one", pace="0.3"), timeout=30
        ) as response:
            lines = response.iter_lines()
            next(lines)
            proxy.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert proxy.process.wait(20) == 0
    assert [step["step_id"] for step in steps_of(lab.run, session)] == ["one"]


@pytest.mark.slow
def test_sigterm_does_not_wait_for_ever(lab: Lab, new_session: NewSession) -> None:
    session = new_session()
    with started(lab, "cut", "/sglang", "--set", "drain_s=1") as proxy:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 800}, "stream": True}
        headers = named(session, "one", pace="0.3")
        with httpx.stream(
            "POST", f"{proxy.url}/generate", json=body, headers=headers, timeout=30
        ) as response:
            next(response.iter_lines())
            proxy.process.send_signal(signal.SIGTERM)
            assert proxy.process.wait(20) == 0
    assert steps_of(lab.run, session) == []


def test_what_is_wrong_on_the_command_line_is_one_line() -> None:
    command = [sys.executable, "-m", "arrow_tq.cli", "proxy", "--upstream", "http://x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "store" in done.stderr
