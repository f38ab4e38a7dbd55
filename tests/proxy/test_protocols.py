"""Every recorded route, whole and streamed: the agent gets what the engine would have sent, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from arrow_tq import fields
from tests.proxy import processes
from tests.proxy.agents import check_segments, events, finalize, named, steps_of, without_reference
from tests.proxy.conftest import Lab
from tests.proxy.processes import Process
from tests.proxy.upstream_engine import experts_of

NewSession = Callable[[], str]
PROMPT = list(b"What is the weather in Reykjav\xc3\xadk?")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather? 🌦 \u00e9"}]


def both(
    lab: Lab, proxy: Process, base: str, path: str, body: dict[str, Any], session: str, step: str
) -> tuple[bytes, bytes]:
    """The answer of the engine itself, and the one through the proxy without its reference."""
    direct = httpx.post(lab.upstream.url + base + path, json=body, timeout=30)
    through = httpx.post(proxy.url + path, json=body, headers=named(session, step), timeout=30)
    assert through.status_code == direct.status_code == 200, through.text
    assert through.headers["content-type"] == direct.headers["content-type"]
    stripped, reference = without_reference(through.content)
    assert reference["recorded"] and reference["session"] == session and reference["step"] == step
    return direct.content, stripped


WISHES: list[dict[str, Any]] = [
    {},
    {"return_logprob": True},
    {"return_logprob": True, "return_routed_experts": True},
    {"return_routed_experts": True, "routed_experts_start_len": len(PROMPT)},
    {"return_prompt_token_ids": True},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wishes", WISHES)
def test_generate(
    lab: Lab, sglang: Process, new_session: NewSession, stream: bool, wishes: dict[str, Any]
) -> None:
    session = new_session()
    prompt = list(PROMPT)
    for turn in range(2):
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 20}, "stream": stream, **wishes}
        direct, through = both(lab, sglang, "/sglang", "/generate", body, session, f"call-{turn}")
        assert through == direct
        last = events(through)[-1] if stream else json.loads(through)
        prompt = [*prompt, *last["output_ids"], *b" and then?"]
    (segment,) = finalize(sglang.url, session, reward=0.5)
    (row,) = check_segments(lab.run, session)
    assert segment["loss_tokens"] == len(row["loss"]) == 40
    assert row["token_ids"] == prompt[: -len(b" and then?")]


def test_generate_from_text(lab: Lab, sglang: Process, new_session: NewSession) -> None:
    session = new_session()
    body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 9}}
    direct, through = both(lab, sglang, "/sglang", "/generate", body, session, "one")
    assert through == direct
    finalize(sglang.url, session)
    (row,) = check_segments(lab.run, session)
    assert bytes(row["token_ids"][:16]) == b"Once upon a time"


CHAT_WISHES: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"return_meta_info": True, "return_prompt_token_ids": True},
    {"return_meta_info": True, "logprobs": True, "return_routed_experts": True},
]


@pytest.mark.parametrize("wishes", CHAT_WISHES)
def test_sglang_chat(lab: Lab, sglang: Process, new_session: NewSession, wishes: dict[str, Any]) -> None:
    session = new_session()
    messages = list(MESSAGES)
    for turn in range(3):
        body = {"model": "m", "messages": messages, "max_tokens": 11, **wishes}
        direct, through = both(lab, sglang, "/sglang", "/v1/chat/completions", body, session, f"call-{turn}")
        assert through == direct
        said = json.loads(through)["choices"][0]["message"]
        messages = [
            *messages,
            {"role": "assistant", "content": said["content"]},
            {"role": "user", "content": "Go on."},
        ]
    finalize(sglang.url, session)
    (row,) = check_segments(lab.run, session)
    assert len(row["loss"]) == 33
    steps = steps_of(lab.run, session)
    told = [json.loads(step["messages"]) for step in steps]
    # Each step has the new messages alone, its answer among them.
    assert [len(one) for one in told] == [3, 2, 2]
    assert told[0][:2] == MESSAGES and told[2][0]["content"] == "Go on."
    assert {step["version"] for step in steps} == {"7"}


@pytest.mark.parametrize("wishes", [{}, {"logprobs": True, "top_logprobs": 0}, {"return_token_ids": True}])
def test_vllm_chat(lab: Lab, vllm: Process, new_session: NewSession, wishes: dict[str, Any]) -> None:
    session = new_session()
    messages = list(MESSAGES)
    for turn in range(2):
        body = {"model": "m", "messages": messages, "max_tokens": 11, **wishes}
        direct, through = both(lab, vllm, "/vllm", "/v1/chat/completions", body, session, f"call-{turn}")
        expected = json.loads(direct)
        # The payload goes even where the engine sends it unasked: nobody downstream wants it.
        assert expected["choices"][0]["routed_experts"] is not None
        expected["choices"][0]["routed_experts"] = None
        assert json.loads(through) == expected
        said = expected["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": "Go on."}]
    finalize(vllm.url, session)
    (row,) = check_segments(lab.run, session)
    assert len(row["loss"]) == 22


def test_vllm_chat_whose_agent_wants_the_routing(lab: Lab, vllm: Process, new_session: NewSession) -> None:
    session = new_session()
    for start, step in [(0, "a"), (30, "b")]:
        body = {"messages": MESSAGES, "max_tokens": 11, "routed_experts_prompt_start": start}
        headers = named(session, step, parent="")
        direct = httpx.post(f"{lab.upstream.url}/vllm/v1/chat/completions", json=body)
        through = httpx.post(f"{vllm.url}/v1/chat/completions", json=body, headers=headers)
        stripped, _ = without_reference(through.content)
        assert stripped == direct.content


@pytest.mark.parametrize("prompt", [PROMPT, "Once upon a time"])
def test_vllm_completions(lab: Lab, vllm: Process, new_session: NewSession, prompt: list[int] | str) -> None:
    session = new_session()
    body = {"model": "m", "prompt": prompt, "max_tokens": 11}
    direct, through = both(lab, vllm, "/vllm", "/v1/completions", body, session, "one")
    expected = json.loads(direct)
    expected["choices"][0]["routed_experts"] = None
    assert json.loads(through) == expected
    finalize(vllm.url, session)
    (row,) = check_segments(lab.run, session)
    assert len(row["loss"]) == 11


@pytest.mark.parametrize(
    ("engine", "path"),
    [("sglang", "/v1/chat/completions"), ("vllm", "/v1/chat/completions"), ("vllm", "/v1/completions")],
)
def test_streams_that_the_engine_cannot_fill_are_told_from_a_whole_answer(
    lab: Lab, request: pytest.FixtureRequest, new_session: NewSession, engine: str, path: str
) -> None:
    proxy: Process = request.getfixturevalue(engine)
    session = new_session()
    asked: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    body = {
        "model": "m",
        **asked,
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if "chat" in path:
        body["replay"] = {
            "content": "Let me look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        }
    response = httpx.post(proxy.url + path, json=body, headers=named(session, "one"))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    told = events(response.content)
    choices = [one["choices"][0] for one in told if one["choices"]]
    assert [one["finish_reason"] for one in choices] == [None, "stop"]
    if "chat" in path:
        delta = choices[0]["delta"]
        assert delta["content"] == "Let me look." and delta["role"] == "assistant"
        assert delta["tool_calls"][0]["index"] == 0
        assert delta["tool_calls"][0]["function"]["name"] == "f"
    else:
        assert len(choices[0]["text"]) == 19
    assert told[-1]["usage"]["completion_tokens"] > 11
    assert told[-1]["arrow_tq"]["recorded"] is True
    finalize(proxy.url, session)
    check_segments(lab.run, session)


@pytest.fixture(scope="module")
def plain(lab: Lab) -> Iterator[Process]:
    """A proxy whose run has no routing: vLLM's streams carry all that it needs."""
    lab.store.run("plain", fields=[fields.token_ids(), fields.logprobs(), fields.loss_mask()])
    log = lab.folder / "plain.log"
    with processes.proxy(
        log, f"{lab.upstream.url}/vllm", lab.server.url, "plain", "--engine", "vllm"
    ) as proxy:
        yield proxy
        assert proxy.stop() == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "wishes", [{}, {"stream_options": {"include_usage": True}, "return_token_ids": True}]
)
def test_vllm_streams_without_routing(
    lab: Lab, plain: Process, new_session: NewSession, path: str, wishes: dict[str, Any]
) -> None:
    session = new_session()
    asked: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    body = {**asked, "max_tokens": 20, "stream": True, **wishes}
    direct, through = both(lab, plain, "/vllm", path, body, session, "one")
    assert through == direct
    assert len(events(through)) >= 3
    (segment,) = finalize(plain.url, session)
    assert segment["loss_tokens"] == 20
    run = lab.store.run("plain")
    (row,) = run.table([session]).to_pylist()
    assert sum(row["loss_mask"]) == 20 and row["token_ids"][-1] == 257
    if "chat" in path:
        (step,) = steps_of(run, session)
        assert json.loads(step["messages"])[-1]["content"] == "".join(map(chr, row["token_ids"][-20:-1]))


def test_events_go_on_as_they_come(sglang: Process, new_session: NewSession) -> None:
    """The engine pauses between events: the first ones are here long before the last."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 32}, "stream": True}
    headers = named(new_session(), pace="0.2")
    seen: list[int] = []
    with httpx.stream("POST", f"{sglang.url}/generate", json=body, headers=headers, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                seen.append(len(json.loads(line[6:])["output_ids"]))
                if len(seen) == 1:
                    # The engine cannot have finished: it has not been asked to go on yet.
                    state = httpx.get(
                        f"{sglang.url}/arrow-tq/sessions/{headers['x-arrow-tq-session']}"
                    ).json()
                    assert state["calls_under_way"] == 1 and state["steps"] == []
    assert seen == [8, 16, 24, 32]


def test_the_engine_is_asked_from_the_first_uncovered_position(
    lab: Lab, sglang: Process, new_session: NewSession
) -> None:
    session = new_session()
    prompt = list(PROMPT)
    starts = []
    for _ in range(3):
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 10}}
        answer = httpx.post(f"{sglang.url}/generate", json=body, headers=named(session)).json()
        starts.append(httpx.get(f"{lab.upstream.url}/seen").json()["starts"][-1])
        rows = answer["arrow_tq"]["fields"]["routed_experts"]
        assert rows["start"] == starts[-1] and rows["start"] + rows["rows"] == len(prompt) + 9
        prompt += answer["output_ids"] + list(b"more")
    # The row of a turn's last token comes with the next turn.
    assert starts == [0, len(PROMPT) + 9, len(PROMPT) + 23]


def test_what_cannot_be_recorded_is_refused_before_the_engine_is_asked(
    lab: Lab, sglang: Process, vllm: Process, new_session: NewSession
) -> None:
    before = sum(httpx.get(f"{lab.upstream.url}/seen").json()["calls"].values())
    for proxy, path, body, status in [
        (sglang, "/generate", {"input_ids": [PROMPT, PROMPT]}, 501),
        (sglang, "/generate", {"text": ["a", "b"]}, 501),
        (sglang, "/generate", {"input_ids": PROMPT, "sampling_params": {"n": 2}}, 501),
        (sglang, "/generate", {"input_ids": [1.5]}, 400),
        (sglang, "/generate", {}, 400),
        (sglang, "/v1/chat/completions", {"messages": MESSAGES, "n": 4}, 501),
        (sglang, "/v1/chat/completions", {"messages": "hello"}, 400),
        (vllm, "/v1/completions", {"prompt": ["a"]}, 501),
        (vllm, "/v1/completions", {"prompt": PROMPT, "echo": True}, 501),
    ]:
        response = httpx.post(proxy.url + path, json=body, headers=named(new_session()))
        assert response.status_code == status, response.text
        assert response.json()["error"]["type"] == "arrow_tq"
    response = httpx.post(
        f"{sglang.url}/generate", content=b'{"input_ids": [1,', headers=named(new_session())
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed-message")
    assert sum(httpx.get(f"{lab.upstream.url}/seen").json()["calls"].values()) == before


def test_the_doubles_formula_is_a_routing() -> None:
    """What the tests compare with: distinct experts, and rows that depend on position."""
    from tests.proxy.conftest import SIZES

    rows = experts_of(np.arange(50, dtype=np.int32), SIZES)
    assert rows.shape == (49, SIZES.layers, SIZES.topk)
    assert all(len(set(layer)) == SIZES.topk for row in rows.tolist() for layer in row)
