"""Damaged responses: whatever an engine sends, decoding ends in an output or in an error of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from arrow_tq.adapters import EngineOutput, Policy, RowRule, sglang, vllm
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.presets import indexer_topk, logprobs, routed_experts, token_ids
from tests import engine_responses as engine
from tests.drawing import drawn

PROMPT, COMPLETION = 3, 4
ROWS = engine.routing(PROMPT + COMPLETION - 1, 2, 2, 16)
FIELDS = {
    "token_ids": token_ids(),
    "logprobs": logprobs(),
    "routed_experts": routed_experts(topk=2, num_experts=16, layer_ids=(1, 2)),
}
WITH_INDEXER = FIELDS | {"indexer_topk": indexer_topk(2, topk=2)}


def by_sglang(response: Any, policy: Policy, start: int) -> EngineOutput:
    fields = WITH_INDEXER if "meta_info" in response else FIELDS
    return sglang.decode(
        response, fields=fields, prompt_tokens=PROMPT, start=start, hidden_layers=3, policy=policy
    )


def by_vllm(response: Any, policy: Policy, start: int) -> EngineOutput:
    return vllm.decode(response, fields=FIELDS, prompt_tokens=PROMPT, start=start, policy=policy)


def responses() -> list[tuple[Callable[[Any, Policy, int], EngineOutput], dict[str, Any]]]:
    every = engine.encoded(engine.with_dense(ROWS, (1, 2), 3))
    chosen = engine.encoded(engine.indexer(len(ROWS), 2, 2))
    versions = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    sgl = engine.generated(
        PROMPT,
        COMPLETION,
        every,
        routed_experts_dtype="int32",
        indexer_topk=chosen,
        weight_versions=versions,
    )
    extension = {"sgl_ext": {"routed_experts": every}}
    return [
        (by_sglang, sgl),
        (by_sglang, engine.chat(PROMPT, [engine.choice(COMPLETION, None, **extension)], metadata={})),
        (by_vllm, engine.chat(PROMPT, [engine.choice(COMPLETION, engine.npy(ROWS.astype(np.uint8)))])),
        (
            by_vllm,
            engine.chat(
                PROMPT,
                [engine.choice(COMPLETION, ROWS[PROMPT:].tolist())],
                prompt_routed_experts=ROWS[:PROMPT].tolist(),
            ),
        ),
    ]


GOOD = responses()
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["abort", "AAAA", "uint8", "é", "====", "\ud800"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a response."""
    found = [path]
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        found += places(value, (*path, key))
    return found


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Callable[[Any, Policy, int], EngineOutput], Any]:
    decode, good = draw(st.sampled_from(GOOD))
    response = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(response)[1:]))
        holder = response
        for key in path[:-1]:
            holder = holder[key]
        old = holder[path[-1]]
        how = draw(st.sampled_from(["replace", "drop", "letter", "cut", "twice"]))
        if how == "letter" and isinstance(old, str) and old:
            at = draw(st.integers(0, len(old) - 1))
            holder[path[-1]] = old[:at] + draw(st.characters()) + old[at + 1 :]
        elif how == "cut" and isinstance(old, str | list) and old:
            holder[path[-1]] = old[: draw(st.integers(0, len(old) - 1))]
        elif how == "twice" and isinstance(old, str | list):
            holder[path[-1]] = old + old
        elif how == "drop":
            del holder[path[-1]]
        else:
            holder[path[-1]] = draw(values)
        if not places(response)[1:]:
            break
    return decode, response


def test_the_undamaged_ones_decode() -> None:
    for decode, response in GOOD:
        output = decode(response, Policy(), 0)
        assert output.routed_experts is not None
        np.testing.assert_array_equal(output.routed_experts.values, ROWS)


@settings(max_examples=drawn(1500), deadline=None)
@given(case=damaged(), rule=st.sampled_from(RowRule), start=st.integers(0, PROMPT))
def test_only_our_errors_escape(
    case: tuple[Callable[[Any, Policy, int], EngineOutput], Any], rule: RowRule, start: int
) -> None:
    decode, response = case
    try:
        output = decode(response, Policy(rule=rule), start)
    except ArrowTQError as error:
        assert error.message
        return
    for rows in output.rows():
        assert rows.values.shape == (len(rows), *rows.field.shape)
        assert rows.end <= PROMPT + output.completion_tokens
    routed = output.routed_experts
    assert output.aborted or routed is not None
    if routed is not None:
        assert routed.start == start
        assert routed.end <= max(start, PROMPT + output.completion_tokens - 1)
        assert routed.values.max(initial=0) < 16


@settings(max_examples=300, deadline=None)
@given(response=values)
def test_what_is_no_response_at_all(response: Any) -> None:
    for decode in (by_vllm, by_sglang if isinstance(response, dict) else by_vllm):
        try:
            output = decode(response, Policy(), 0)
        except ArrowTQError:
            continue
        raise AssertionError(f"{response!r} became {output!r}")
