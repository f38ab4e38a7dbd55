"""Sessions through the proxy: branches, retries, rewrites, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.proxy.agents import (
    RECORDED,
    check_segments,
    finalize,
    generate,
    named,
    sampled,
    steps_of,
    without_reference,
)
from tests.proxy.conftest import Lab, started
from tests.proxy.processes import Process

NewSession = Callable[[], str]
PROMPT = list(b"A prompt of some tokens")
MORE = list(b" and more")


def test_a_repeated_call_is_answered_and_not_made_again(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    first = generate(sglang.url, session, PROMPT, "one", seed=1)
    again = generate(sglang.url, session, PROMPT, "one", seed=2)
    assert again.content == first.content
    assert (first.headers[RECORDED], again.headers[RECORDED]) == ("yes", "replayed")
    assert [step["step_id"] for step in steps_of(lab.run, session)] == ["one"]


def test_a_repeated_stream_is_answered_and_not_made_again(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    first = generate(sglang.url, session, PROMPT, "one", seed=1, stream=True)
    again = generate(sglang.url, session, PROMPT, "one", seed=2, stream=True)
    assert again.content == first.content and again.headers["content-type"] == first.headers["content-type"]
    assert len(steps_of(lab.run, session)) == 1


def test_the_same_call_at_the_same_time_is_made_once(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(generate, sglang.url, session, PROMPT, "one", seed=seed) for seed in range(6)]
        answers = {call.result().content for call in calls}
    assert len(answers) == 1
    assert len(steps_of(lab.run, session)) == 1


def test_a_call_repeated_after_the_proxy_forgot_it_replaces_the_first(
    lab: Lab, new_session: NewSession
) -> None:
    """The proxy is killed after the commit: the agent's second answer is the one that counts."""
    session = new_session()
    with started(lab, "before", "/sglang") as proxy:
        first = sampled(generate(proxy.url, session, PROMPT, "one", seed=1))
        proxy.kill()
    with started(lab, "after", "/sglang") as proxy:
        second = sampled(generate(proxy.url, session, PROMPT, "one", seed=2))
        assert second != first
        third = sampled(generate(proxy.url, session, [*PROMPT, *second, *MORE], "two"))
        finalize(proxy.url, session)
    steps = steps_of(lab.run, session)
    assert [(step["step_id"], step["status"]) for step in steps] == [
        ("one", "superseded"), ("one~2", "committed"), ("two", "committed"),
    ]  # fmt: skip
    (row,) = check_segments(lab.run, session)
    assert row["token_ids"] == [*PROMPT, *second, *MORE, *third]
    assert len(row["loss"]) == 24


def test_branches_by_header(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    root = sampled(generate(sglang.url, session, PROMPT, "root"))
    prompt = [*PROMPT, *root, *MORE]
    leaves = [
        sampled(generate(sglang.url, session, prompt, f"leaf-{n}", parent="root", seed=n)) for n in range(3)
    ]
    apart = sampled(generate(sglang.url, session, list(b"Another"), "apart", parent=""))
    # Only what is new is stored: the branches share their beginning.
    rows = generate(sglang.url, session, prompt, "leaf-9", parent="root", seed=9).json()["arrow_tq"]["fields"]
    assert rows["routed_experts"]["start"] == len(PROMPT) + len(root) - 1
    segments = finalize(sglang.url, session)
    assert len(segments) == 5
    found = sorted(row["token_ids"] for row in check_segments(lab.run, session))
    expected = [[*prompt, *leaf] for leaf in leaves] + [[*b"Another", *apart]]
    assert all(one in found for one in expected)
    assert sum(one["loss_tokens"] for one in segments) == 6 * 12


def test_an_unknown_parent_is_refused_and_leaves_nothing(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    response = generate(sglang.url, session, PROMPT, "one", parent="never")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not-found")
    assert steps_of(lab.run, session) == []


def test_a_rewritten_history_ends_the_segment(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    """A compaction: the next prompt is another, that begins as the first did."""
    session = new_session()
    one = sampled(generate(sglang.url, session, PROMPT, "one"))
    two = sampled(generate(sglang.url, session, [*PROMPT, *one, *MORE], "two"))
    compacted = [*PROMPT[:8], *b"summary"]
    three = sampled(generate(sglang.url, session, compacted, "three"))
    four = sampled(generate(sglang.url, session, [*compacted, *three, *MORE], "four"))
    finalize(sglang.url, session)
    rows = check_segments(lab.run, session)
    assert sorted(row["token_ids"] for row in rows) == sorted(
        [[*PROMPT, *one, *MORE, *two], [*compacted, *three, *MORE, *four]]
    )
    assert {row["finish_reason"] for row in rows} == {"rewrite", "end"}


def test_a_history_cut_back_to_an_earlier_step_shares_what_that_had(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    one = sampled(generate(sglang.url, session, PROMPT, "one"))
    prompt = [*PROMPT, *one, *MORE]
    generate(sglang.url, session, prompt, "two")
    other = generate(sglang.url, session, [*PROMPT, *one, *b" else"], "three")
    assert other.json()["arrow_tq"]["fields"]["routed_experts"]["start"] == len(PROMPT) + len(one) - 1
    finalize(sglang.url, session)
    assert len(check_segments(lab.run, session)) == 2


def chat(
    proxy: Process, session: str, messages: list[dict[str, object]], step: str, **more: object
) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 9, **more}
    return httpx.post(f"{proxy.url}/v1/chat/completions", json=body, headers=named(session, step))


def test_tokens_that_are_not_as_the_messages_promised_are_asked_for_again(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    """The messages only grew, but the agent changed its copy of the answer: other tokens, a mismatch."""
    session = new_session()
    messages: list[dict[str, object]] = [{"role": "user", "content": "A long enough question"}]
    chat(sglang, session, messages, "one")
    calls = httpx.get(f"{lab.upstream.url}/seen").json()["calls"]["/sglang/v1/chat/completions"]
    messages = [
        *messages,
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "And a longer one"},
    ]
    answer = chat(sglang, session, messages, "two")
    assert answer.status_code == 200
    seen = httpx.get(f"{lab.upstream.url}/seen").json()
    assert seen["calls"]["/sglang/v1/chat/completions"] == calls + 2
    assert seen["starts"][-1] == 0
    finalize(sglang.url, session)
    rows = check_segments(lab.run, session)
    assert {row["finish_reason"] for row in rows} == {"mismatch", "end"}


def test_other_tools_end_the_segment(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    messages: list[dict[str, object]] = [{"role": "user", "content": "Use tools"}]
    said = chat(sglang, session, messages, "one", tools=tools[:1]).json()["choices"][0]["message"]
    messages = [*messages, said, {"role": "user", "content": "Others"}]
    assert chat(sglang, session, messages, "two", tools=tools).status_code == 200
    finalize(sglang.url, session)
    assert {row["finish_reason"] for row in check_segments(lab.run, session)} == {"tools", "end"}


def test_open_look_finalize_and_reward(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    base = f"{sglang.url}/arrow-tq/sessions/{session}"
    opened = httpx.post(f"{base}/open", json={"group": "g-1", "columns": {"task_name": "airline"}})
    assert opened.json()["group"] == "g-1" and opened.json()["steps"] == []
    assert generate(sglang.url, session, PROMPT, "one", group="g-2").status_code == 409
    generate(sglang.url, session, PROMPT, "one", group="g-1")
    assert httpx.get(base).json()["last_step"] == "one"
    segments = finalize(sglang.url, session, reward=1.5, columns={"source": "test"})
    assert finalize(sglang.url, session, reward=1.5, columns={"source": "test"}) == segments
    assert httpx.post(f"{base}/finalize", json={"reward": 2}).status_code == 409
    made = httpx.get(f"{lab.upstream.url}/seen").json()["calls"]
    assert generate(sglang.url, session, PROMPT, "two").json()["error"]["code"] == "session-closed"
    # The engine was not asked in vain.
    assert httpx.get(f"{lab.upstream.url}/seen").json()["calls"] == made
    assert httpx.post(f"{base}/reward", json={"reward": -1.0, "columns": {"late": 1}}).json()["segments"] == 1
    found = lab.run.sql(
        f"SELECT group_id, reward, task_name, source, late FROM segments WHERE session_id = '{session}'"
    )
    assert found.to_pylist() == [
        {"group_id": "g-1", "reward": -1.0, "task_name": "airline", "source": "test", "late": 1}
    ]
    assert httpx.post(f"{base}/finalize", json={"odd": 1}).status_code == 400
    timeline = finalize(sglang.url, session, view="timeline")
    assert timeline[0]["segment_id"].endswith("~t0")


def test_abort_frees_everything(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    generate(sglang.url, session, PROMPT, "one")
    response = httpx.post(
        f"{sglang.url}/arrow-tq/sessions/{session}/abort", json={"reason": "environment died"}
    )
    assert response.json() == {"session": session, "aborted": True}
    found = lab.run.sql(f"SELECT status, reason FROM sessions WHERE session_id = '{session}'").to_pylist()
    assert found == [{"status": "aborted", "reason": "environment died"}]
    assert generate(sglang.url, session, PROMPT, "two").status_code == 409


def test_an_abandoned_step_is_nobodys_parent(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    one = sampled(generate(sglang.url, session, PROMPT, "one"))
    generate(sglang.url, session, [*PROMPT, *one, *MORE], "two/odd")
    response = httpx.post(f"{sglang.url}/arrow-tq/sessions/{session}/steps/two%2Fodd/abandon")
    assert response.json()["steps"] == 1
    last = sampled(generate(sglang.url, session, [*PROMPT, *one, *b" instead"], "three"))
    finalize(sglang.url, session)
    (row,) = check_segments(lab.run, session)
    assert row["token_ids"] == [*PROMPT, *one, *b" instead", *last]


def test_a_retry_under_another_name(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    generate(sglang.url, session, PROMPT, "first", seed=1)
    kept = sampled(generate(sglang.url, session, PROMPT, "second", retry_of="first", seed=2))
    finalize(sglang.url, session)
    (row,) = check_segments(lab.run, session)
    assert row["token_ids"] == [*PROMPT, *kept]


def test_versions_reach_the_segments(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    one = sampled(generate(sglang.url, session, PROMPT, "one"))
    httpx.post(f"{lab.upstream.url}/version", json={"version": "8"})
    generate(sglang.url, session, [*PROMPT, *one, *MORE], "two")
    httpx.post(f"{lab.upstream.url}/version", json={"version": "7"})
    finalize(sglang.url, session)
    found = lab.run.sql(f"SELECT version_min, version_max FROM segments WHERE session_id = '{session}'")
    assert found.to_pylist() == [{"version_min": "7", "version_max": "8"}]


def test_an_answer_that_two_versions_sampled_is_two_steps(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    one = sampled(generate(sglang.url, session, PROMPT, "one", fault="versions"))
    two = sampled(generate(sglang.url, session, [*PROMPT, *one, *MORE], "two", parent="one"))
    steps = steps_of(lab.run, session)
    assert [(step["step_id"], step["parent_id"], step["version"]) for step in steps] == [
        ("one.0", None, "7"), ("one", "one.0", "8"), ("two", "one", "7"),
    ]  # fmt: skip
    finalize(sglang.url, session)
    (row,) = check_segments(lab.run, session)
    assert row["token_ids"] == [*PROMPT, *one, *MORE, *two] and len(row["loss"]) == 24


@pytest.mark.slow
def test_a_repeated_call_replaces_both_steps_of_the_first(lab: Lab, new_session: NewSession) -> None:
    session = new_session()
    with started(lab, "versions-before", "/sglang") as proxy:
        sampled(generate(proxy.url, session, PROMPT, "one", seed=1, fault="versions"))
        proxy.kill()
    with started(lab, "versions-after", "/sglang") as proxy:
        kept = sampled(generate(proxy.url, session, PROMPT, "one", seed=2, fault="versions"))
        finalize(proxy.url, session)
    statuses = {step["step_id"]: step["status"] for step in steps_of(lab.run, session)}
    assert statuses == {
        "one.0": "superseded", "one": "superseded", "one~2.0": "committed", "one~2": "committed",
    }  # fmt: skip
    (row,) = check_segments(lab.run, session)
    assert row["token_ids"] == [*PROMPT, *kept] and len(row["loss"]) == 12


def test_receipts_instead_of_payload(lab: Lab, new_session: NewSession) -> None:
    """The engine's recorder stored the routing: its receipts travel, and not a byte of payload."""
    session = new_session()
    with started(lab, "receipts", "/recorded", "--routing", "receipts") as proxy:
        prompt, counted = list(PROMPT), 0
        for turn, stream in enumerate((False, True)):
            answer = generate(proxy.url, session, prompt, f"call-{turn}", stream=stream)
            assert (
                b"arrow_tq_receipts" not in answer.content
                and b"routed" not in without_reference(answer.content)[0]
            )
            last = answer.text.split("data: ")[-2] if stream else answer.text
            told = json.loads(last)
            counted += told["arrow_tq"]["fields"]["routed_experts"]["rows"]
            prompt = [*prompt, *told["output_ids"], *MORE]
        finalize(proxy.url, session)
        (row,) = check_segments(lab.run, session)
        assert counted == len(row["token_ids"]) - 1
        chatting = new_session()
        answer = chat(proxy, chatting, [{"role": "user", "content": "Receipts, please"}], "one")
        assert b"arrow_tq_receipts" not in answer.content
        finalize(proxy.url, chatting)
        check_segments(lab.run, chatting)
        refused = generate(proxy.url, new_session(), PROMPT, fault="more-rows")
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "row-count-mismatch")
