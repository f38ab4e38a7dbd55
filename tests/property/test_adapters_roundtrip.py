"""Random routing, encoded as each engine would: decoded, it is equal, wherever it begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from arrow_tq.adapters import EngineOutput, Policy, sglang, vllm
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.presets import indexer_topk, routed_experts
from tests import engine_responses as engine

UNCHECKED = Policy(identical_rows_max=None)


@dataclass(frozen=True)
class Call:
    """A model call: its routing, and the model's layers."""

    prompt: int
    completion: int
    start: int
    hidden: int
    field: Field
    rows: np.ndarray
    """Of the field's layers, at positions [start, T - 1)."""
    missing: np.ndarray
    """Which rows the engine does not have: they come as -1."""

    @property
    def sent(self) -> np.ndarray:
        rows = self.rows.copy()
        rows[self.missing] = -1
        return rows

    def check(self, output: EngineOutput, nulls: bool) -> None:
        found = output.routed_experts
        assert found is not None
        assert found.start == self.start
        assert found.values.dtype == self.field.type.numpy
        there = ~self.missing if nulls else np.ones(len(self.rows), bool)
        valid = np.ones(len(self.rows), bool) if found.valid is None else found.valid
        np.testing.assert_array_equal(valid, there)
        np.testing.assert_array_equal(found.values[there], self.rows[there])
        assert not found.values[~there].any()


@st.composite
def calls(draw: st.DrawFn) -> Call:
    prompt, completion = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    start = draw(st.integers(0, prompt))
    hidden = draw(st.integers(1, 7))
    kept = draw(st.lists(st.integers(0, hidden - 1), min_size=1, unique=True))
    experts = draw(st.sampled_from([4, 128, 256, 257, 1000]))
    topk = draw(st.integers(2, 4))
    rows = engine.routing(prompt + completion - 1 - start, len(kept), topk, experts, draw(st.integers(0, 99)))
    missing = np.zeros(len(rows), bool)
    if len(rows):
        missing[draw(st.lists(st.integers(0, len(rows) - 1), max_size=4))] = True
    return Call(
        prompt, completion, start, hidden, routed_experts(None, topk, experts, layer_ids=kept), rows, missing
    )


@settings(max_examples=150, deadline=None)
@given(call=calls(), dtype=st.sampled_from(["int32", "uint16", "uint8", None]), tensor=st.booleans())
def test_sglang(call: Call, dtype: str | None, tensor: bool) -> None:
    if dtype == "uint8" and (call.field.num_experts or 0) > 256:
        dtype = "uint16"
    signed = dtype in (None, "int32")
    every = engine.with_dense(call.sent if signed else call.rows, call.field.layer_ids or (), call.hidden)
    payload: Any = every if tensor and signed else engine.encoded(every, dtype or "int32")
    response = engine.generated(call.prompt, call.completion, payload, routed_experts_dtype=dtype)
    output = sglang.decode(
        response,
        fields={"routed_experts": call.field},
        prompt_tokens=call.prompt,
        start=call.start,
        hidden_layers=call.hidden,
        policy=UNCHECKED,
    )
    call.check(output, nulls=signed)


@settings(max_examples=150, deadline=None)
@given(call=calls(), signed=st.booleans())
def test_vllm_npy(call: Call, signed: bool) -> None:
    narrow = "uint8" if (call.field.num_experts or 0) <= 256 else "uint16"
    text = engine.npy(call.sent.astype(np.int16) if signed else call.rows.astype(narrow))
    response = engine.chat(call.prompt, [engine.choice(call.completion, text)])
    output = vllm.decode(
        response,
        fields={"routed_experts": call.field},
        prompt_tokens=call.prompt,
        start=call.start,
        policy=UNCHECKED,
    )
    call.check(output, nulls=signed)


@settings(max_examples=80, deadline=None)
@given(call=calls())
def test_vllm_halves(call: Call) -> None:
    completion = len(call.rows) + 1
    before = engine.routing(call.prompt, *call.rows.shape[1:], call.field.num_experts or 0)
    choice = engine.choice(completion, call.sent.tolist())
    response = engine.chat(call.prompt, [choice], prompt_routed_experts=before.tolist())
    output = vllm.decode(
        response, fields={"routed_experts": call.field}, prompt_tokens=call.prompt, policy=UNCHECKED
    )
    assert output.routed_experts is not None
    np.testing.assert_array_equal(output.routed_experts.values[: call.prompt], before)
    generated = output.routed_experts.between(call.prompt, output.routed_experts.end)
    replace(call, start=call.prompt).check(replace(output, routed_experts=generated), nulls=True)


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.integers(1, 20),
    completion=st.integers(1, 20),
    layers=st.integers(1, 3),
    topk=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_indexer(prompt: int, completion: int, layers: int, topk: int, seed: int) -> None:
    chosen = engine.indexer(prompt + completion - 1, layers, topk, seed)
    response = engine.generated(prompt, completion, None, indexer_topk=engine.encoded(chosen))
    fields = {"indexer_topk": indexer_topk(layers, topk=topk)}
    output = sglang.decode(response, fields=fields, prompt_tokens=prompt, start=prompt)
    assert output.indexer_topk is not None
    assert output.indexer_topk.valid is None
    np.testing.assert_array_equal(output.indexer_topk.values, chosen)
