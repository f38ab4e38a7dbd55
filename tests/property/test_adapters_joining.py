"""A response cut into a stream's events and joined again decodes to the same, however it was cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq.adapters import EngineOutput, Policy, StreamJoiner, sglang, vllm
from arrow_tq_schemas import errors, presets
from tests import engine_responses as engine

LAYERS, TOPK, EXPERTS = 2, 3, 64
POLICY = Policy(identical_rows_max=None)
FIELDS = {
    "token_ids": presets.token_ids(),
    "logprobs": presets.logprobs(),
    "routed_experts": presets.routed_experts(LAYERS, TOPK, EXPERTS),
}


def equal(one: EngineOutput, other: EngineOutput) -> None:
    assert (one.prompt_tokens, one.completion_tokens, one.finish_reason, one.versions) == (
        *(other.prompt_tokens, other.completion_tokens, other.finish_reason, other.versions),
    )
    for name in FIELDS:
        left, right = getattr(one, name), getattr(other, name)
        assert left.start == right.start
        np.testing.assert_array_equal(left.values, right.values)
        np.testing.assert_array_equal(left.valid, right.valid)


def pieces(data: st.DataObject, count: int) -> list[tuple[int, int]]:
    """A completion's tokens, event by event; some events have none."""
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5), label="cuts"))
    return list(itertools.pairwise([0, *cuts, count]))


def fed(events: list[dict[str, Any]], as_text: bool, choice: int = 0) -> StreamJoiner:
    joiner = StreamJoiner(choice)
    for event in events:
        assert not joiner.finished or event.get("choices") == []
        joiner.feed(json.dumps(event) if as_text else event)
    joiner.feed(b"[DONE]")
    return joiner


def generate_events(
    data: st.DataObject, whole: dict[str, Any], ids_grow: bool, pairs_grow: bool
) -> list[dict[str, Any]]:
    """As SGLang's own route sends them; ``..._grow``: a list has all tokens so far."""
    events = []
    meta = whole["meta_info"]
    spans = pieces(data, meta["completion_tokens"])
    for number, (start, end) in enumerate(spans):
        last = number == len(spans) - 1
        known = {key: value for key, value in meta.items() if key != "routed_experts" or last}
        known["completion_tokens"] = end
        known["finish_reason"] = meta["finish_reason"] if last else None
        known["output_token_logprobs"] = meta["output_token_logprobs"][0 if pairs_grow else start : end]
        events.append({"output_ids": whole["output_ids"][0 if ids_grow else start : end], "meta_info": known})
    return events


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    prompt=st.integers(1, 9),
    completion=st.integers(1, 30),
    ids_grow=st.booleans(),
    pairs_grow=st.booleans(),
    as_text=st.booleans(),
)
def test_sglang_generate(
    data: st.DataObject, prompt: int, completion: int, ids_grow: bool, pairs_grow: bool, as_text: bool
) -> None:
    rows = engine.routing(prompt + completion - 1, LAYERS, TOPK, EXPERTS)
    half = completion // 2
    spans = [{"version": "3", "start": 0, "end": half}, {"version": "4", "start": half, "end": completion}]
    whole = engine.generated(
        prompt, completion, engine.encoded(rows), weight_versions=spans if half else spans[1:]
    )
    events = generate_events(data, whole, ids_grow, pairs_grow)
    joiner = fed(events, as_text)
    outputs = [
        sglang.decode(one, fields=FIELDS, prompt_tokens=prompt, policy=POLICY)
        for one in (whole, joiner.response())
    ]
    equal(*outputs)
    # Fed and joined again, an answer in one piece is itself.
    assert fed([whole], as_text).response() == whole
    cut = data.draw(st.integers(0, len(events) - 1), label="cut")
    with pytest.raises(errors.MalformedMessage, match=f"after {cut} events"):
        fed(events[:cut], as_text).response()


def chat_events(
    data: st.DataObject, whole: dict[str, Any], many: bool, usage_last: bool
) -> list[dict[str, Any]]:
    """As OpenAI-like routes send them, with another choice's events in between where there are ``many``."""
    (choice,) = whole["choices"]
    index = 1 if many else 0
    head = {key: value for key, value in whole.items() if key not in ("choices", "usage")}
    events: list[dict[str, Any]] = [{**head, "choices": [{"index": index, "delta": {"role": "assistant"}}]}]
    count = len(choice["token_ids"])
    spans = pieces(data, count)
    for number, (start, end) in enumerate(spans):
        last = number == len(spans) - 1
        known: dict[str, Any] = {
            "index": index,
            "delta": {"content": "..."},
            "token_ids": choice["token_ids"][start:end],
            "logprobs": {key: value[start:end] for key, value in choice["logprobs"].items()},
            "finish_reason": choice["finish_reason"] if last else None,
        }
        more = set(choice) - {"index", "message", "token_ids", "logprobs", "finish_reason"}
        if last:
            known.update({key: choice[key] for key in more})
        if many:
            other = {"index": 0, "delta": {"content": "x"}, "token_ids": [1], "finish_reason": None}
            events.append({**head, "choices": [other]})
        events.append({**head, "choices": [known]})
    if usage_last:
        events.append({**head, "choices": [], "usage": whole["usage"]})
    return events


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    prompt=st.integers(1, 9),
    completion=st.integers(1, 30),
    many=st.booleans(),
    usage_last=st.booleans(),
    older=st.booleans(),
)
def test_openai_like(
    data: st.DataObject, prompt: int, completion: int, many: bool, usage_last: bool, older: bool
) -> None:
    rows = engine.routing(prompt + completion - 1, LAYERS, TOPK, EXPERTS)
    for decode, more in (
        (vllm.decode, {"routed": engine.npy(rows.astype(np.uint8))}),
        (sglang.decode, {"routed": None, "sgl_ext": {"routed_experts": engine.encoded(rows)}}),
    ):
        choice = engine.choice(completion, **more)  # type: ignore[arg-type]
        if older:
            chances = [one["logprob"] for one in choice["logprobs"]["content"]]
            choice["logprobs"] = {"tokens": ["x"] * completion, "token_logprobs": chances}
        whole = engine.chat(prompt, [choice], metadata={"weight_version": "3"})
        joiner = fed(chat_events(data, whole, many, usage_last and not many), False, 1 if many else 0)
        joined = decode(
            joiner.response(), fields=FIELDS, prompt_tokens=prompt, policy=POLICY, choice=1 if many else 0
        )
        equal(decode(whole, fields=FIELDS, prompt_tokens=prompt, policy=POLICY), joined)


def event(told: int, *pairs: int, finish: str | None = None) -> dict[str, object]:
    listed = [[-1.0, pair, None] for pair in pairs]
    return {
        "meta_info": {
            "output_token_logprobs": listed,
            "completion_tokens": told,
            "finish_reason": None if finish is None else {"type": finish},
        }
    }


def test_what_does_not_add_up_is_refused() -> None:
    joiner = StreamJoiner()
    joiner.feed(event(2, 5, 6))
    with pytest.raises(errors.RowCountMismatch, match="1 after 2, of 4"):
        joiner.feed(event(4, 7))
    with pytest.raises(errors.MalformedMessage, match="not what an earlier event had"):
        joiner.feed(event(3, 5, 7, 8))
    joiner.feed(event(3, 7, finish="stop"))
    assert joiner.finished
    with pytest.raises(errors.MalformedMessage, match="after the completion's end"):
        joiner.feed(event(4, 8))
    for wrong in ("{", "[]", "null", {"id": "x"}, {"error": {"message": "out of memory"}}, {"choices": [1]}):
        with pytest.raises(errors.MalformedMessage):
            StreamJoiner().feed(wrong)  # type: ignore[arg-type]
    uncounted = StreamJoiner()
    uncounted.feed({"meta_info": {"output_token_logprobs": [[-1.0, 5, None]]}})
    with pytest.raises(errors.MalformedMessage, match="no completion_tokens"):
        uncounted.feed({"meta_info": {"output_token_logprobs": [[-1.0, 6, None]]}})
