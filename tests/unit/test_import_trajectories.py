"""From records to trajectories: OpenAI messages and ATIF, names, rewards, columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arrow_tq.importer.atif_steps import parse_atif
from arrow_tq.importer.openai_messages import parse_messages
from arrow_tq.importer.records import Record
from arrow_tq.importer.source import Source, Survey
from arrow_tq.importer.trajectory import GivenTokens, Keys, Trajectory
from arrow_tq_schemas.errors import MalformedMessage

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def messages(**record: Any) -> Trajectory:
    record.setdefault("messages", [USER, ANSWER])
    return parse_messages(record, Keys(), "file-1")


def test_each_answer_is_a_turn_and_what_follows_is_trailing() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    result = {"role": "tool", "content": "\ud800", "tool_call_id": "1"}
    found = messages(messages=[USER, call, result, ANSWER, ANSWER, USER])
    assert [turn.messages for turn in found.turns] == [[USER, call], [result, ANSWER], [ANSWER]]
    assert found.trailing == [USER]
    assert not found.has_tokens


@pytest.mark.parametrize(
    ("record", "session", "group"),
    [
        ({"task_id": 3, "trial": 1}, "task-3/trial-1", "task-3"),
        ({"task_id": 3}, "task-3/file-1", "task-3"),
        ({"session_id": "s", "task_id": "p"}, "s", "p"),
        ({"id": 9}, "id-9", None),
        ({"group": 0, "sample": 0}, "group-0/sample-0", "group-0"),
        ({}, "file-1", None),
        ({"session_id": "", "group": None}, "file-1", None),
    ],
)
def test_names(record: dict[str, Any], session: str, group: str | None) -> None:
    found = messages(**record)
    assert (found.session_id, found.group) == (session, group)


def test_scalars_become_columns_and_the_rest_is_noted() -> None:
    found = messages(
        task_id=3,
        trial=0,
        session_id="s",
        reward=1,
        model="m",
        ok=True,
        status="x",
        ttl_s=4,
        tools=[1],
        nan=math.nan,
        huge=2**70,
        nothing=None,
        **{"not a name": 1, "bad": "\ud800"},
    )
    assert found.reward == 1.0
    assert found.columns == {
        "task_id": 3,
        "trial": 0,
        "model": "m",
        "ok": True,
        "status_": "x",
        "ttl_s_": 4,
        "bad": "\ufffd",
    }
    assert sorted(found.notes) == [
        "key 'huge' has a number no column can hold and is left out there",
        "key 'nan' has a number no column can hold and is left out there",
        "key 'not a name' cannot name a column and is left out",
        "key 'status' is column 'status_': the name is taken",
        "key 'tools' is no scalar and is left out",
        "key 'ttl_s' is column 'ttl_s_': the name is taken",
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": None}, "messages: missing"),
        ({"messages": []}, "messages: expected a list of messages, got an empty list"),
        ({"messages": "hi"}, "messages: expected a list of messages, got str"),
        ({"messages": [USER]}, "messages: none of 1 is by the assistant"),
        ({"messages": [USER, 3]}, r"messages\[1\]: expected an object, got int"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role: expected text, got None"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            r"messages\[0\].content: expected text, parts or null",
        ),
        ({"messages": [{**ANSWER, "tool_calls": {}}]}, r"messages\[0\].tool_calls: expected a list"),
        ({"reward": "high"}, "reward: expected a finite number, got 'high'"),
        ({"reward": math.nan}, "reward: expected a finite number, got 'nan'"),
        ({"reward": 10**400}, "reward: expected a finite number"),
        ({"task_id": 1.5}, "task_id: expected text or an integer, got float"),
        ({"session_id": "a~0"}, "session id 'a~0': an ending like"),
        ({"session_id": "\ud800"}, "a lone surrogate"),
        ({"session_id": "x" * 300}, "expected 1 to 256 bytes"),
    ],
)
def test_what_is_wrong_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        messages(**record)


# -- ATIF ------------------------------------------------------------------------------------------


def atif(steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    numbered = [{"step_id": index, **step} for index, step in enumerate(steps, start=1)]
    agent = {"name": "terminus", "version": "1"}
    return {"schema_version": "ATIF-v1.8", "session_id": "a-1", "agent": agent, "steps": numbered, **more}


def agent(message: str = "ok", prompt: Any = None, completion: Any = None, **more: Any) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": message, **more}
    if prompt is not None or completion is not None:
        step["metrics"] = {"prompt_token_ids": prompt, "completion_token_ids": completion}
    return step


ASK = {"source": "user", "message": "do it \ud800"}


def test_atif_steps_become_messages() -> None:
    call = {"tool_call_id": "c", "function_name": "ls", "arguments": {"b": 1, "a": [2]}}
    results = [{"source_call_id": "c", "content": "x"}, {"content": None}]
    record = atif(
        [
            {"source": "system", "message": "rules"},
            ASK,
            agent("looking", reasoning_content="hm", tool_calls=[call], observation={"results": results}),
            agent("done"),
        ],
        extra={"reward": 0.5, "group": "g", "kind": "t"},
    )
    found = parse_atif(record, Keys(), "f")
    first, second = found.turns
    assert first.messages[1] == {"role": "user", "content": "do it \ud800"}
    assert first.messages[2] == {
        "role": "assistant",
        "content": "looking",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"a": [2], "b": 1}'}}
        ],
    }
    assert second.messages[:2] == [
        {"role": "tool", "content": "x", "tool_call_id": "c"},
        {"role": "tool", "content": None},
    ]
    assert (found.session_id, found.group, found.reward) == ("a-1", "g", 0.5)
    assert found.columns == {"kind": "t", "agent": "terminus", "agent_version": "1"}


def test_atif_token_ids_are_used_as_they_are() -> None:
    record = atif([ASK, agent("x", [1, 2], [3]), agent("y", [1, 2, 3, 4], [5, 6])])
    record["steps"][1]["metrics"]["logprobs"] = [-0.5]
    found = parse_atif(record, Keys(), "f")
    assert [turn.given for turn in found.turns] == [
        GivenTokens([1, 2], [3], [-0.5]),
        GivenTokens([1, 2, 3, 4], [5, 6], None),
    ]
    survey = Survey()
    survey.add(found)
    assert (survey.token_id_max, survey.with_logprobs, survey.needs_tokenizer) == (6, 1, False)


def test_atif_copied_and_deterministic_steps_are_context() -> None:
    record = atif(
        [agent("old", is_copied_context=True), ASK, agent("script", llm_call_count=0), agent("new")]
    )
    (turn,) = parse_atif(record, Keys(), "f").turns
    assert [message["content"] for message in turn.messages] == ["old", "do it \ud800", "script", "new"]


def with_metrics(**metrics: Any) -> dict[str, Any]:
    return atif([ASK, {"source": "agent", "message": "m", "metrics": metrics}])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"schema_version": "x", "steps": []}, "not ATIF: agent: Field required"),
        (atif([]), "steps: none of 0 is an agent's model call"),
        (atif([ASK]), "steps: none of 1 is an agent's model call"),
        (atif([ASK, agent("a", [1], [2]), agent("b")]), "model call 1 has no token ids and 1 others have"),
        (with_metrics(completion_token_ids=[1]), "prompt_token_ids and completion_token_ids go together"),
        (with_metrics(prompt_token_ids=[1], completion_token_ids=[]), "completion_token_ids: empty"),
        (with_metrics(prompt_token_ids=[-1], completion_token_ids=[1]), r"prompt_token_ids: -1 to -1"),
        (with_metrics(prompt_token_ids=[2**31], completion_token_ids=[1]), "expected 0 to 2147483647"),
        (
            with_metrics(prompt_token_ids=[1], completion_token_ids=[1, 2], logprobs=[0.1]),
            r"steps\[1\].metrics: 1 logprobs for 2 completion_token_ids",
        ),
        (
            with_metrics(prompt_token_ids=[1], completion_token_ids=[1], logprobs=[math.inf]),
            "logprobs: not all are finite",
        ),
        (atif([ASK, agent("a", [1], [2], llm_call_count=2)]), "token ids of 2 model calls in one step"),
    ],
)
def test_what_is_wrong_with_atif_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        parse_atif(record, Keys(), "f")


# -- formats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [({"messages": [USER, ANSWER]}, parse_messages), (atif([ASK, agent()]), parse_atif)],
)
def test_auto_tells_the_formats_apart(value: dict[str, Any], kind: Callable[..., Trajectory]) -> None:
    record = Record(Path("x.jsonl"), 7, value)
    assert Source((), "auto").parse(record) == kind(value, Keys(), "x-7")


def test_a_bad_record_names_file_and_line() -> None:
    with pytest.raises(MalformedMessage, match=r"^x\.jsonl:7: neither chat messages .* nor ATIF"):
        Source((), "auto").parse(Record(Path("x.jsonl"), 7, {"rows": []}))
    with pytest.raises(MalformedMessage, match=r"^x\.jsonl:8: not JSON"):
        Source((), "auto").parse(Record(Path("x.jsonl"), 8, None, "not JSON: oops"))
