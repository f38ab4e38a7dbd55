"""Each known deviation of an engine, as docs/engines.md lists it: refused, or taken as declared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrow_tq.adapters import EngineOutput, Policy, RowRule, sglang, vllm
from arrow_tq_schemas import errors
from arrow_tq_schemas.presets import indexer_topk, routed_experts, token_ids
from tests import engine_responses as engine

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"
PROMPT, COMPLETION, START = 6, 5, 4
TOKENS = PROMPT + COMPLETION
EXPERTS = routed_experts(layers=3, topk=4, num_experts=64)
ROWS = engine.routing(TOKENS + 3, 3, 4, 64)


def decode(rows: engine.Ids, rule: RowRule = RowRule.EXACT, start: int = 0, **policy: Any) -> EngineOutput:
    """Through SGLang, without dense layers."""
    response = engine.generated(PROMPT, COMPLETION, engine.encoded(rows))
    return sglang.decode(
        response,
        fields={"routed_experts": EXPERTS},
        prompt_tokens=PROMPT,
        start=start,
        policy=Policy(rule=rule, **policy),
    )


def kept(output: EngineOutput) -> tuple[int, engine.Ids]:
    assert output.routed_experts is not None
    return output.routed_experts.start, output.routed_experts.values


def test_one_row_a_token_at_a_stop_edge() -> None:
    with pytest.raises(errors.RowCountMismatch, match=r"11 rows, expected 10.*RowRule\.STOP_EDGE") as caught:
        decode(ROWS[:TOKENS])
    assert caught.value.details == {
        "field": "routed_experts",
        "rule": "exact",
        "rows": 11,
        "expected": 10,
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "start": 0,
    }
    for rows in (TOKENS - 1, TOKENS):
        start, values = kept(decode(ROWS[:rows], RowRule.STOP_EDGE))
        assert start == 0
        np.testing.assert_array_equal(values, ROWS[: TOKENS - 1])
    with pytest.raises(errors.RowCountMismatch, match="12 rows, expected 10: rule 'stop-edge'"):
        decode(ROWS[: TOKENS + 1], RowRule.STOP_EDGE)


def test_a_row_missing_after_prefill_only() -> None:
    with pytest.raises(errors.RowCountMismatch, match=r"9 rows, expected 10.*RowRule\.PREFILL_ONLY"):
        decode(ROWS[: TOKENS - 2])
    start, values = kept(decode(ROWS[: TOKENS - 2], RowRule.PREFILL_ONLY))
    assert (start, len(values)) == (0, TOKENS - 2)
    np.testing.assert_array_equal(values, ROWS[: TOKENS - 2])
    with pytest.raises(errors.RowCountMismatch, match="8 rows, expected 10"):
        decode(ROWS[: TOKENS - 3], RowRule.PREFILL_ONLY)


def test_rows_past_the_stop_token() -> None:
    with pytest.raises(errors.RowCountMismatch, match=r"13 rows, expected 10.*RowRule\.PAST_STOP"):
        decode(ROWS[: TOKENS + 2])
    start, values = kept(decode(ROWS[START : TOKENS + 2], RowRule.PAST_STOP, start=START))
    assert start == START
    np.testing.assert_array_equal(values, ROWS[START : TOKENS - 1])
    many = engine.routing(TOKENS - 1 + 65, 3, 4, 64)
    with pytest.raises(errors.RowCountMismatch, match="75 rows, expected 10"):
        decode(many, RowRule.PAST_STOP)
    with pytest.raises(errors.RowCountMismatch, match="9 rows, expected 10"):
        decode(many[:9], RowRule.PAST_STOP)


def test_a_server_that_ignores_the_start() -> None:
    with pytest.raises(errors.RowCountMismatch, match=r"10 rows, expected 6.*start 4 ignored.*IGNORES_START"):
        decode(ROWS[: TOKENS - 1], start=START)
    start, values = kept(decode(ROWS[: TOKENS - 1], RowRule.IGNORES_START, start=START))
    assert start == START
    np.testing.assert_array_equal(values, ROWS[START : TOKENS - 1])
    start, values = kept(decode(ROWS[START : TOKENS - 1], RowRule.IGNORES_START, start=START))
    np.testing.assert_array_equal(values, ROWS[START : TOKENS - 1])


def test_a_count_that_fits_two_deviations_is_not_chosen_for_the_caller() -> None:
    with pytest.raises(errors.RowCountMismatch, match=r"STOP_EDGE\) or .*IGNORES_START\)"):
        decode(ROWS[: TOKENS - 1], start=1)
    np.testing.assert_array_equal(
        kept(decode(ROWS[: TOKENS - 1], RowRule.STOP_EDGE, start=1))[1], ROWS[: TOKENS - 2]
    )
    np.testing.assert_array_equal(
        kept(decode(ROWS[: TOKENS - 1], RowRule.IGNORES_START, start=1))[1], ROWS[1 : TOKENS - 1]
    )


def split(generated: engine.Ids | None, prompt: engine.Ids | None, finish: str = "stop") -> dict[str, Any]:
    half = None if prompt is None else prompt.tolist()
    choice = engine.choice(COMPLETION, None if generated is None else generated.tolist(), finish)
    return engine.chat(PROMPT, [choice], prompt_routed_experts=half)


def decode_split(response: dict[str, Any], rule: RowRule = RowRule.EXACT, start: int = 0) -> EngineOutput:
    fields = {"routed_experts": EXPERTS}
    return vllm.decode(response, fields=fields, prompt_tokens=PROMPT, start=start, policy=Policy(rule=rule))


def test_half_of_a_split_response() -> None:
    with pytest.raises(errors.RowCountMismatch, match=r"4 rows, expected 10.*the generated tokens alone"):
        decode_split(split(ROWS[PROMPT : TOKENS - 1], None))
    with pytest.raises(errors.RowCountMismatch, match=r"prompt_routed_experts: 5 rows for 6 prompt tokens"):
        decode_split(split(ROWS[PROMPT : TOKENS - 1], ROWS[: PROMPT - 1]))
    start, values = kept(decode_split(split(ROWS[PROMPT : TOKENS - 1], None), start=PROMPT))
    assert start == PROMPT, "where the prompt's rows were not asked for, the half is all of it"
    np.testing.assert_array_equal(values, ROWS[PROMPT : TOKENS - 1])


def test_a_split_response_with_a_row_for_every_generated_token() -> None:
    response = split(ROWS[PROMPT:TOKENS], ROWS[:PROMPT])
    with pytest.raises(errors.RowCountMismatch, match=r"11 rows, expected 10.*STOP_EDGE"):
        decode_split(response)
    np.testing.assert_array_equal(kept(decode_split(response, RowRule.STOP_EDGE))[1], ROWS[: TOKENS - 1])


def test_rows_of_cached_positions_become_null() -> None:
    cached = ROWS[: TOKENS - 1].copy()
    cached[:3] = -1
    output = decode_split(split(cached[PROMPT:], cached[:PROMPT]))
    assert output.routed_experts is not None
    assert output.routed_experts.valid is not None
    assert output.routed_experts.valid.tolist() == [False] * 3 + [True] * 7
    np.testing.assert_array_equal(output.routed_experts.values[3:], ROWS[3 : TOKENS - 1])
    assert not output.routed_experts.values[:3].any()
    assert output.routed_experts.array.null_count == 3
    cached[5, 1, 2] = -1
    with pytest.raises(errors.ValueOutOfRange, match=r"value -1 at position 5, index \[1, 2\]"):
        decode_split(split(cached[PROMPT:], cached[:PROMPT]))


def test_padded_rows_beside_dense_layers_become_null() -> None:
    rows = ROWS[: TOKENS - 1].copy()
    rows[4] = -1
    field = routed_experts(topk=4, num_experts=64, layer_ids=(1, 2, 4))
    every = engine.encoded(engine.with_dense(rows, (1, 2, 4), 5))
    output = sglang.decode(
        engine.generated(PROMPT, COMPLETION, every),
        fields={"routed_experts": field},
        prompt_tokens=PROMPT,
        hidden_layers=5,
    )
    assert output.routed_experts is not None
    assert output.routed_experts.valid is not None
    assert np.flatnonzero(~output.routed_experts.valid).tolist() == [4]


def test_a_capture_of_nothing_but_zeros() -> None:
    for rows in (np.zeros_like(ROWS[: TOKENS - 1]), np.r_[ROWS[:8], np.zeros_like(ROWS[:2])]):
        with pytest.raises(errors.MalformedMessage, match="is expert 0 in every layer: its routing was not"):
            decode(rows)
    with pytest.raises(errors.MalformedMessage, match="the row of position 0 is expert 0 in every layer"):
        text = engine.npy(np.zeros((TOKENS - 1, 3, 4), np.uint8))
        response = engine.chat(PROMPT, [engine.choice(COMPLETION, text)])
        vllm.decode(response, fields={"routed_experts": EXPERTS}, prompt_tokens=PROMPT)


def test_a_layer_of_nothing_but_zeros() -> None:
    rows = ROWS[: TOKENS - 1].copy()
    rows[:, 1] = 0
    with pytest.raises(errors.MalformedMessage, match=r"layers \[1\] chose expert 0 alone in all 10 rows"):
        decode(rows)
    dense = routed_experts(topk=4, num_experts=64, layer_ids=(0, 2))
    output = sglang.decode(
        engine.generated(PROMPT, COMPLETION, engine.encoded(rows)),
        fields={"routed_experts": dense},
        prompt_tokens=PROMPT,
        hidden_layers=3,
    )
    np.testing.assert_array_equal(kept(output)[1], rows[:, [0, 2]])


def test_one_expert_a_token_may_be_expert_0_for_a_while() -> None:
    field = routed_experts(layers=2, topk=1, num_experts=8)

    def of(count: int) -> EngineOutput:
        rows = np.tile(np.array([[[0], [3]], [[0], [4]]], np.int32), (count // 2, 1, 1))
        response = engine.generated(1, count, engine.encoded(rows))
        return sglang.decode(response, fields={"routed_experts": field}, prompt_tokens=1)

    assert len(kept(of(64))[1]) == 64
    with pytest.raises(errors.MalformedMessage, match=r"layers \[0\] chose expert 0 alone in all 66 rows"):
        of(66)


@pytest.mark.parametrize("first", [0, 1, 700, 1200])
def test_rows_of_a_stale_buffer(first: int) -> None:
    field = routed_experts(layers=48, topk=8, num_experts=128)
    rows = engine.routing(1400, 48, 8, 128)

    def of(equal: int, limit: int | None) -> EngineOutput:
        stale = rows.copy()
        stale[first : first + equal] = stale[first]
        response = engine.generated(1, 1400, engine.encoded(stale))
        policy = Policy(identical_rows_max=limit)
        return sglang.decode(response, fields={"routed_experts": field}, prompt_tokens=1, policy=policy)

    of(64, 64)
    with pytest.raises(
        errors.MalformedMessage, match=f"from position {first} on more than 64 rows are equal"
    ):
        of(65, 64)
    of(199, None)


def test_equal_rows_around_a_null_one_are_two_runs() -> None:
    rows = np.repeat(ROWS[:1], TOKENS - 1, axis=0)
    rows[5] = -1
    assert len(kept(decode(rows, identical_rows_max=5))[1]) == TOKENS - 1
    with pytest.raises(errors.MalformedMessage, match="from position 0 on more than 4 rows"):
        decode(rows, identical_rows_max=4)


def test_experts_that_the_model_does_not_have() -> None:
    rows = ROWS[: TOKENS - 1].copy()
    rows[7, 2, 3] = 64
    with pytest.raises(
        errors.ValueOutOfRange, match=r"value 64 at position 7, index \[2, 3\]: expected 0 to 63"
    ):
        decode(rows)


def test_an_abort_may_come_without_anything() -> None:
    fields = {"token_ids": token_ids(), "routed_experts": EXPERTS, "indexer_topk": indexer_topk(3, topk=2)}
    queued = {
        "text": "",
        "meta_info": {"id": "7e1f", "finish_reason": {"type": "abort"}, "weight_version": "3"},
    }
    output = sglang.decode(queued, fields=fields, prompt_tokens=PROMPT)
    assert output.aborted
    assert (output.routed_experts, output.indexer_topk, output.completion_tokens) == (None, None, 0)
    output = decode_split(split(None, None, "abort"))
    assert output.aborted
    assert (output.routed_experts, output.completion_tokens) == (None, COMPLETION)
    with pytest.raises(errors.RowCountMismatch, match="9 rows, expected 10"):
        short = engine.generated(PROMPT, COMPLETION, engine.encoded(ROWS[:9]), "abort")
        sglang.decode(short, fields={"routed_experts": EXPERTS}, prompt_tokens=PROMPT)


def test_nothing_else_may_come_without_routing() -> None:
    words = "has no routed_experts, and its finish reason is 'stop': only an abort may come without"
    with pytest.raises(errors.MalformedMessage, match=words):
        decode_split(split(None, None))
    with pytest.raises(errors.MalformedMessage, match=words):
        response = engine.generated(PROMPT, COMPLETION, None)
        sglang.decode(response, fields={"routed_experts": EXPERTS}, prompt_tokens=PROMPT)


def test_a_wrong_number_of_layers_is_a_wrong_number_of_rows() -> None:
    every = engine.encoded(engine.with_dense(ROWS[: TOKENS - 1], (1, 2, 4), 6))
    response = engine.generated(PROMPT, COMPLETION, every)
    with pytest.raises(errors.RowCountMismatch, match="20 rows, expected 10"):
        sglang.decode(response, fields={"routed_experts": EXPERTS}, prompt_tokens=PROMPT)


def test_policies_that_make_no_sense() -> None:
    with pytest.raises(errors.InvalidInput, match="rule 'exact': expected a RowRule"):
        Policy(rule="exact")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInput, match="identical_rows_max 0: expected a positive integer"):
        Policy(identical_rows_max=0)


def test_the_documents_table_names_tests_that_exist() -> None:
    table = DOCS.read_text().split("## Known deviations")[1]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(test_\w+)`", line) for line in lines[1:]]
    assert len(named) >= 15
    assert all(named), "every deviation has a test"
    assert {name for names in named for name in names} <= set(globals())
    assert {rule.name for rule in RowRule} - {"EXACT"} <= set(re.findall(r"`RowRule\.(\w+)`", table))
