"""SGLang's shapes, one by one; what deviates is in test_adapters_deviations."""

from __future__ import annotations

import base64
import subprocess
import sys

import numpy as np
import pytest

from arrow_tq.adapters import VersionSpan, sglang
from arrow_tq_schemas import errors
from arrow_tq_schemas.presets import indexer_topk, logprobs, routed_experts, token_ids
from tests import engine_responses as engine

MOE = (1, 2, 4)
EXPERTS = routed_experts(topk=4, num_experts=64, layer_ids=MOE)
INDEXER = indexer_topk(2, topk=3)
FIELDS = {"token_ids": token_ids(), "logprobs": logprobs(), "routed_experts": EXPERTS}
PROMPT, COMPLETION = 5, 7
ROWS = engine.routing(PROMPT + COMPLETION - 1, 3, 4, 64)
EVERY = engine.with_dense(ROWS, MOE, 6)


@pytest.mark.parametrize("dtype", [None, "int32", "uint16", "uint8"])
def test_base64_of_every_dtype_becomes_the_fields(dtype: str | None) -> None:
    text = engine.encoded(EVERY, dtype or "int32")
    response = engine.generated(PROMPT, COMPLETION, text, routed_experts_dtype=dtype)
    output = sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)
    assert output.routed_experts is not None
    assert output.routed_experts.start == 0
    assert output.routed_experts.values.dtype == np.uint8
    assert output.routed_experts.valid is None
    np.testing.assert_array_equal(output.routed_experts.values, ROWS)


def test_ids_log_probs_and_how_it_ended() -> None:
    response = engine.generated(PROMPT, COMPLETION, engine.encoded(EVERY), finish="length")
    output = sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)
    ids, chances = engine.tokens(COMPLETION)
    assert output.token_ids is not None
    assert output.logprobs is not None
    assert output.token_ids.values.tolist() == ids
    assert output.token_ids.values.dtype == np.int32
    np.testing.assert_array_equal(output.logprobs.values, np.array(chances, np.float32))
    assert output.logprobs.values.dtype == np.float32
    assert (output.token_ids.start, output.logprobs.start) == (PROMPT, PROMPT)
    assert output.sampled == (PROMPT, PROMPT + COMPLETION)
    assert output.finish_reason == "length"
    assert not output.aborted
    assert output.version == "3"


def test_rows_begin_where_they_were_asked_for() -> None:
    response = engine.generated(PROMPT, COMPLETION, engine.encoded(EVERY[3:]))
    output = sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, start=3, hidden_layers=6)
    assert output.routed_experts is not None
    assert output.routed_experts.start == 3
    assert output.routed_experts.end == PROMPT + COMPLETION - 1
    np.testing.assert_array_equal(output.routed_experts.values, ROWS[3:])


def test_layers_are_kept_in_the_fields_order() -> None:
    field = routed_experts(topk=4, num_experts=64, layer_ids=(4, 1))
    response = engine.generated(PROMPT, COMPLETION, engine.encoded(EVERY))
    output = sglang.decode(response, fields={"routed_experts": field}, prompt_tokens=PROMPT, hidden_layers=6)
    assert output.routed_experts is not None
    np.testing.assert_array_equal(output.routed_experts.values, ROWS[:, [2, 0]])
    assert output.token_ids is None, "only what was declared is decoded"


def test_tensors_are_taken_as_they_are() -> None:
    import torch

    for tensor in (EVERY, torch.from_numpy(EVERY), EVERY.reshape(len(EVERY), -1), EVERY.ravel()):
        response = engine.generated(PROMPT, COMPLETION, tensor)
        output = sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)
        assert output.routed_experts is not None
        np.testing.assert_array_equal(output.routed_experts.values, ROWS)


def test_output_ids_stand_in_where_no_log_probs_were_asked_for() -> None:
    response = engine.generated(PROMPT, COMPLETION, None, output_token_logprobs=None)
    output = sglang.decode(response, fields={"token_ids": token_ids("int64")}, prompt_tokens=PROMPT)
    assert output.token_ids is not None
    assert output.token_ids.values.tolist() == engine.tokens(COMPLETION)[0]
    assert output.token_ids.values.dtype == np.int64
    with pytest.raises(errors.MalformedMessage, match="has no logprobs, and its finish reason is 'stop'"):
        sglang.decode(response, fields={"logprobs": logprobs()}, prompt_tokens=PROMPT)


def test_ids_that_contradict_each_other_are_refused() -> None:
    response = engine.generated(PROMPT, COMPLETION, None)
    response["output_ids"][2] += 1
    with pytest.raises(errors.MalformedMessage, match=r"output_ids and the ids of .*_logprobs differ"):
        sglang.decode(response, fields={"token_ids": token_ids()}, prompt_tokens=PROMPT)
    response["output_ids"].pop()
    response["meta_info"].pop("completion_tokens")
    response["meta_info"]["completion_tokens"] = COMPLETION + 2
    with pytest.raises(errors.RowCountMismatch, match=r"_logprobs has 7, response\.meta_info: .* has 9"):
        sglang.decode(response, fields={"token_ids": token_ids()}, prompt_tokens=PROMPT)


def test_another_prompt_than_the_callers_is_refused() -> None:
    response = engine.generated(PROMPT, COMPLETION, engine.encoded(EVERY))
    with pytest.raises(errors.RowCountMismatch, match="the engine counts 5 prompt tokens, the caller 4"):
        sglang.decode(response, fields=FIELDS, prompt_tokens=4, hidden_layers=6)


def test_weight_versions_cover_the_output_without_gaps() -> None:
    def spans(*edges: tuple[str, int, int]) -> tuple[VersionSpan, ...]:
        listed = [{"version": name, "start": first, "end": end} for name, first, end in edges]
        response = engine.generated(PROMPT, COMPLETION, None, weight_versions=listed)
        return sglang.decode(response, fields={}, prompt_tokens=PROMPT).versions

    assert spans(("3", 0, 4), ("4", 4, 7)) == (VersionSpan("3", 5, 9), VersionSpan("4", 9, 12))
    with pytest.raises(errors.MalformedMessage, match=r"\[1\]: version '4' over \[5, 7\): expected one from"):
        spans(("3", 0, 4), ("4", 5, 7))
    with pytest.raises(errors.MalformedMessage, match="they end at 6 of 7 tokens"):
        spans(("3", 0, 6))
    with pytest.raises(errors.MalformedMessage, match=r"version '3' over \[0, 0\)"):
        spans(("3", 0, 0))


def test_an_output_of_several_versions_is_recorded_in_parts() -> None:
    listed = [{"version": "3", "start": 0, "end": 4}, {"version": "4", "start": 4, "end": 7}]
    response = engine.generated(PROMPT, COMPLETION, engine.encoded(EVERY), weight_versions=listed)
    output = sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)
    with pytest.raises(errors.InvalidInput, match=r"versions \['3', '4'\] sampled one output"):
        _ = output.version
    first, second = output.by_version()
    assert (first.version, first.sampled, first.finish_reason) == ("3", (5, 9), None)
    assert (second.version, second.sampled, second.finish_reason) == ("4", (9, 12), "stop")
    for name in ("token_ids", "logprobs", "routed_experts"):
        one, other, whole = (getattr(part, name) for part in (first, second, output))
        assert (one.start, one.end, other.end) == (whole.start, other.start, whole.end)
        np.testing.assert_array_equal(np.concatenate([one.values, other.values]), whole.values)
    assert first.routed_experts is not None
    assert first.routed_experts.end == 8, "the row of token 8 came when token 9 was sampled, by version 4"


def test_indexer_positions_keep_their_pads() -> None:
    chosen = engine.indexer(PROMPT + COMPLETION - 1, 2, 3)
    response = engine.generated(PROMPT, COMPLETION, None, indexer_topk=engine.encoded(chosen))
    output = sglang.decode(response, fields={"indexer_topk": INDEXER}, prompt_tokens=PROMPT, start=4)
    assert output.indexer_topk is not None
    assert output.indexer_topk.start == 0, "whatever start was asked for routing"
    np.testing.assert_array_equal(output.indexer_topk.values, chosen)
    assert output.indexer_topk.valid is None


def test_an_indexer_cannot_choose_what_comes_later() -> None:
    chosen = engine.indexer(PROMPT + COMPLETION - 1, 2, 3)
    chosen[6, 1, 2] = 7
    response = engine.generated(PROMPT, COMPLETION, None, indexer_topk=engine.encoded(chosen))
    with pytest.raises(
        errors.ValueOutOfRange, match=r"value 7 at position 6, index \[1, 2\]: expected -1 to"
    ):
        sglang.decode(response, fields={"indexer_topk": INDEXER}, prompt_tokens=PROMPT)
    chosen[6, 1, 2] = -2
    response = engine.generated(PROMPT, COMPLETION, None, indexer_topk=engine.encoded(chosen))
    with pytest.raises(errors.ValueOutOfRange, match="value -2 at position 6"):
        sglang.decode(response, fields={"indexer_topk": INDEXER}, prompt_tokens=PROMPT)


@pytest.mark.parametrize("where", ["choice", "choice-sglext", "response"])
def test_the_openai_route(where: str) -> None:
    extension = {"routed_experts": engine.encoded(EVERY)}
    one = engine.choice(COMPLETION, None)
    response = engine.chat(PROMPT, [one], metadata={"weight_version": "9"})
    if where == "response":
        response["sglext"] = extension
    else:
        one["sgl_ext" if where == "choice" else "sglext"] = extension
    output = sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)
    assert output.routed_experts is not None
    assert output.token_ids is not None
    np.testing.assert_array_equal(output.routed_experts.values, ROWS)
    assert output.token_ids.values.tolist() == engine.tokens(COMPLETION)[0]
    assert (output.finish_reason, output.version) == ("stop", "9")


def test_one_extension_cannot_serve_two_choices() -> None:
    choices = [engine.choice(COMPLETION, None), engine.choice(COMPLETION, None)]
    response = engine.chat(PROMPT, choices, sglext={"routed_experts": engine.encoded(EVERY)})
    with pytest.raises(errors.MalformedMessage, match="of which choice is not said"):
        sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6, choice=1)
    with pytest.raises(errors.MalformedMessage, match="has 2, number 2 was asked for"):
        sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6, choice=2)


def test_text_that_is_no_base64_is_refused_where_it_ends_to_be() -> None:
    text = engine.encoded(EVERY)
    for broken, words in (
        (text[:40] + "*" + text[41:], "no base64 at or after character 0"),
        (text[:-3], "expected a multiple of 4"),
        (text[:40] + "A===" + text[44:], "no base64 at or after"),
        (text[:40] + "é" + text[41:], "no base64 at or after"),
        (text[:40] + "\n" + text[41:], "no base64 at or after"),
    ):
        response = engine.generated(PROMPT, COMPLETION, broken)
        with pytest.raises(errors.MalformedMessage, match=words):
            sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)


def test_bytes_that_are_no_rows_are_refused() -> None:
    text = base64.b64encode(EVERY.astype("<i4").tobytes() + b"\0\0").decode()
    response = engine.generated(PROMPT, COMPLETION, text)
    with pytest.raises(
        errors.MalformedMessage, match=r"1058 bytes are no .* 6 layers x 4 ids of int32"
    ) as caught:
        sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)
    assert caught.value.details == {"bytes": 1058, "layers": 6, "topk": 4, "dtype": "int32"}
    response = engine.generated(PROMPT, COMPLETION, text, routed_experts_dtype="float32")
    with pytest.raises(errors.MalformedMessage, match="'float32', expected one of int32, uint16, uint8"):
        sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)


def test_the_count_is_settled_before_anything_is_decoded() -> None:
    response = engine.generated(PROMPT, COMPLETION, "*" * (4 * 6 * 4 * 50 * 4 // 3))
    with pytest.raises(errors.RowCountMismatch, match="50 rows, expected 11"):
        sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=6)


def test_log_probs_are_finite_numbers() -> None:
    for value, kind, words in (
        (float("nan"), errors.ValueOutOfRange, "log-prob nan at position 7"),
        (float("-inf"), errors.ValueOutOfRange, "log-prob -inf at position 7"),
        (1.5, errors.ValueOutOfRange, "log-prob 1.5 at position 7"),
        (None, errors.MalformedMessage, "expected a list of log-probs, got None at number 2"),
        ("x", errors.MalformedMessage, "expected a list of log-probs, got <U"),
    ):
        response = engine.generated(PROMPT, COMPLETION, None)
        response["meta_info"]["output_token_logprobs"][2][0] = value
        with pytest.raises(kind, match=words):
            sglang.decode(response, fields={"logprobs": logprobs()}, prompt_tokens=PROMPT)


def test_token_ids_fit_their_field() -> None:
    for value, kind, words in (
        (-1, errors.ValueOutOfRange, "token id -1 at position 6: expected 0 to 2147483647"),
        (1 << 31, errors.ValueOutOfRange, "token id 2147483648 at position 6"),
        (1 << 70, errors.MalformedMessage, "expected a list of token ids, got object"),
        (2.5, errors.MalformedMessage, "expected a list of token ids, got float64"),
    ):
        response = engine.generated(PROMPT, COMPLETION, None)
        response.pop("output_ids")
        response["meta_info"]["output_token_logprobs"][1][1] = value
        with pytest.raises(kind, match=words):
            sglang.decode(response, fields={"token_ids": token_ids()}, prompt_tokens=PROMPT)
    response["meta_info"]["output_token_logprobs"][1] = [0.0]
    with pytest.raises(
        errors.MalformedMessage, match=r"_logprobs\[1\]: expected \(logprob, token id, text\)"
    ):
        sglang.decode(response, fields={"token_ids": token_ids()}, prompt_tokens=PROMPT)


def test_declarations_that_do_not_fit() -> None:
    response = engine.generated(PROMPT, COMPLETION, engine.encoded(EVERY))
    with pytest.raises(errors.InvalidField, match=r"layers \[4\] are not among the 4 different ones"):
        sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=4)
    with pytest.raises(
        errors.InvalidField, match=r"integers of \[layers, topk\] with layer_axis 0, got int32"
    ):
        sglang.decode(response, fields={"routed_experts": token_ids()}, prompt_tokens=PROMPT)
    for start in (-1, PROMPT + 1, "0"):
        with pytest.raises(errors.InvalidInput, match="start"):
            sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, start=start, hidden_layers=6)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInput, match="layers 0: expected a positive integer"):
        sglang.decode(response, fields=FIELDS, prompt_tokens=PROMPT, hidden_layers=0)


def test_importing_the_adapters_imports_neither_torch_nor_the_store() -> None:
    code = (
        "import sys, arrow_tq.adapters.sglang, arrow_tq.adapters.vllm; "
        "print([m for m in ('torch', 'duckdb', 'apsw', 'arrow_tq.store') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
