"""vLLM's shapes, one by one; what deviates is in test_adapters_deviations."""

from __future__ import annotations

import base64
import io
import struct

import numpy as np
import pytest

from arrow_tq.adapters import vllm
from arrow_tq_schemas import errors
from arrow_tq_schemas.presets import logprobs, routed_experts, token_ids
from tests import engine_responses as engine

EXPERTS = routed_experts(layers=3, topk=4, num_experts=64)
FIELDS = {"token_ids": token_ids(), "logprobs": logprobs(), "routed_experts": EXPERTS}
PROMPT, COMPLETION = 5, 7
ROWS = engine.routing(PROMPT + COMPLETION - 1, 3, 4, 64)


def answer(routed: object, **more: object) -> dict[str, object]:
    return engine.chat(PROMPT, [engine.choice(COMPLETION, routed)], **more)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "int64"])
def test_npy_of_every_dtype_becomes_the_fields(dtype: str) -> None:
    output = vllm.decode(answer(engine.npy(ROWS.astype(dtype))), fields=FIELDS, prompt_tokens=PROMPT)
    assert output.routed_experts is not None
    assert output.routed_experts.values.dtype == np.uint8
    np.testing.assert_array_equal(output.routed_experts.values, ROWS)
    assert output.token_ids is not None
    assert output.token_ids.values.tolist() == engine.tokens(COMPLETION)[0]
    assert output.logprobs is not None
    np.testing.assert_array_equal(output.logprobs.values, np.array(engine.tokens(COMPLETION)[1], np.float32))
    assert output.versions == ()
    assert output.version is None


def test_more_than_256_experts() -> None:
    field = routed_experts(layers=3, topk=4, num_experts=512)
    rows = engine.routing(PROMPT + COMPLETION - 1, 3, 4, 512)
    output = vllm.decode(
        answer(engine.npy(rows.astype(np.uint16))), fields={"routed_experts": field}, prompt_tokens=PROMPT
    )
    assert output.routed_experts is not None
    assert output.routed_experts.values.dtype == np.uint16
    np.testing.assert_array_equal(output.routed_experts.values, rows)


def test_rows_begin_where_they_were_asked_for() -> None:
    text = engine.npy(ROWS[4:].astype(np.uint8))
    output = vllm.decode(answer(text), fields=FIELDS, prompt_tokens=PROMPT, start=4)
    assert output.routed_experts is not None
    assert output.routed_experts.start == 4
    np.testing.assert_array_equal(output.routed_experts.values, ROWS[4:])


def test_a_field_may_keep_some_of_the_moe_layers() -> None:
    field = routed_experts(topk=4, num_experts=64, layer_ids=(7, 3))
    text = engine.npy(ROWS.astype(np.uint8))
    output = vllm.decode(
        answer(text), fields={"routed_experts": field}, prompt_tokens=PROMPT, moe_layers=(3, 5, 7)
    )
    assert output.routed_experts is not None
    np.testing.assert_array_equal(output.routed_experts.values, ROWS[:, [2, 0]])


@pytest.mark.parametrize("form", ["lists", "numpy", "torch"])
def test_the_two_halves_of_0_21(form: str) -> None:
    import torch

    as_form = {"lists": np.ndarray.tolist, "numpy": np.asarray, "torch": torch.from_numpy}[form]
    halves = [as_form(half) for half in np.split(ROWS.astype(np.int16), [PROMPT])]
    response = answer(halves[1], prompt_routed_experts=halves[0])
    output = vllm.decode(response, fields=FIELDS, prompt_tokens=PROMPT)
    assert output.routed_experts is not None
    assert output.routed_experts.start == 0
    np.testing.assert_array_equal(output.routed_experts.values, ROWS)


def test_the_prompts_half_serves_every_choice() -> None:
    other = engine.routing(2, 3, 4, 64, seed=1)
    choices = [engine.choice(COMPLETION, ROWS[PROMPT:].tolist()), engine.choice(3, other.tolist())]
    response = engine.chat(PROMPT, choices, prompt_routed_experts=ROWS[:PROMPT].tolist())
    output = vllm.decode(response, fields=FIELDS, prompt_tokens=PROMPT, choice=1)
    assert output.routed_experts is not None
    np.testing.assert_array_equal(output.routed_experts.values, np.concatenate([ROWS[:PROMPT], other]))
    assert output.completion_tokens == 3


def test_log_probs_of_the_completions_route() -> None:
    one = engine.choice(COMPLETION, None)
    one["logprobs"] = {"tokens": ["x"] * COMPLETION, "token_logprobs": engine.tokens(COMPLETION)[1]}
    output = vllm.decode(engine.chat(PROMPT, [one]), fields={"logprobs": logprobs()}, prompt_tokens=PROMPT)
    assert output.logprobs is not None
    np.testing.assert_array_equal(output.logprobs.values, np.array(engine.tokens(COMPLETION)[1], np.float32))
    one["logprobs"]["token_logprobs"].pop()
    with pytest.raises(errors.RowCountMismatch, match=r"token_ids has 7, .*logprobs has 6"):
        vllm.decode(engine.chat(PROMPT, [one]), fields={}, prompt_tokens=PROMPT)


def edited(header: bytes, version: bytes = b"\x01\x00", data: bytes = b"") -> str:
    length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return base64.b64encode(b"\x93NUMPY" + version + length + header + data).decode()


def test_a_header_is_read_by_a_grammar_and_never_evaluated() -> None:
    narrow = ROWS.astype(np.uint8)
    good = b"{'descr': '|u1', 'fortran_order': False, 'shape': (11, 3, 4), }"
    for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        output = vllm.decode(
            answer(edited(good + b" " * 20 + b"\n", version, narrow.tobytes())),
            fields=FIELDS,
            prompt_tokens=PROMPT,
        )
        assert output.routed_experts is not None
        np.testing.assert_array_equal(output.routed_experts.values, ROWS)
    for header, words in (
        (good.replace(b"'|u1'", b"'|O8'"), r"a \.npy of '\|O8' in C order"),
        (good.replace(b"|u1", b">i4"), r"a \.npy of '>i4' in C order"),
        (good.replace(b"|u1", b"<f4"), r"a \.npy of '<f4' in C order"),
        (good.replace(b"False", b"True"), r"in Fortran order"),
        (good.replace(b"(11, 3, 4)", b"(11, 12)"), r"shape \[11, 12\], expected \[rows, 3 layers, 4 ids\]"),
        (good.replace(b"(11, 3, 4)", b"(11, 4, 3)"), r"shape \[11, 4, 3\], expected"),
        (good.replace(b"11", b"9" * 15), r"has 11999999999999988 bytes, got 132"),
        (good.replace(b"11", b"9" * 30), r"shape that cannot be read"),
        (good.replace(b"(11, 3, 4)", b"(11,, 3, 4)"), r"shape that cannot be read"),
        (good.replace(b"(11, 3, 4)", b"__import__('os')"), r"header that cannot be read"),
        (good + b"x" * 5000, r"a \.npy header of 5063 bytes, expected at most 4096"),
    ):
        with pytest.raises(errors.MalformedMessage, match=words):
            vllm.decode(answer(edited(header, data=narrow.tobytes())), fields=FIELDS, prompt_tokens=PROMPT)


def test_files_cut_short_are_refused_wherever_they_end() -> None:
    file = io.BytesIO()
    np.save(file, ROWS.astype(np.uint8))
    whole = file.getvalue()
    for end in [*range(0, 140, 3), len(whole) - 1]:
        with pytest.raises(errors.MalformedMessage, match=r"choices\[0\]\.routed_experts: "):
            vllm.decode(answer(base64.b64encode(whole[:end]).decode()), fields=FIELDS, prompt_tokens=PROMPT)


def test_pickled_objects_are_refused_unopened() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(errors.MalformedMessage, match="header that cannot be read"):
        vllm.decode(answer(base64.b64encode(file.getvalue()).decode()), fields=FIELDS, prompt_tokens=PROMPT)


def test_lists_that_are_no_array_are_refused() -> None:
    rows = ROWS.tolist()
    for broken, words in (
        ([*rows[:-1], rows[-1][:-1]], "nested lists that are no array"),
        ([[[0.5] * 4] * 3] * 11, "an array of float64, expected integers"),
        ([[[None] * 4] * 3] * 11, "an array of object, expected integers"),
        ([[[True] * 4] * 3] * 11, "an array of bool, expected integers"),
        ([[[1] * 3] * 4] * 11, r"shape \[11, 4, 3\], expected \[rows, 3 layers, 4 ids\]"),
        ({"data": "x"}, "expected base64 text, a tensor or nested lists, got dict"),
        (7, "expected base64 text, a tensor or nested lists, got 7"),
    ):
        with pytest.raises(errors.MalformedMessage, match=words):
            vllm.decode(answer(broken), fields=FIELDS, prompt_tokens=PROMPT)


def test_what_is_no_response_is_refused() -> None:
    for response, words in (
        ([], "response: expected an object, got list"),
        ({}, r"response\.choices: has 0, number 0 was asked for"),
        ({"choices": "x"}, r"response\.choices: expected a list, got 'x'"),
        ({"choices": [7]}, r"response\.choices\[0\]: expected an object, got 7"),
        ({"choices": [{"finish_reason": 7}]}, "finish_reason: expected a string, got 7"),
        ({"choices": [{"finish_reason": "stop"}]}, "neither token ids nor log-probs nor a count"),
    ):
        with pytest.raises(errors.MalformedMessage, match=words):
            vllm.decode(response, fields=FIELDS, prompt_tokens=PROMPT)  # type: ignore[arg-type]
