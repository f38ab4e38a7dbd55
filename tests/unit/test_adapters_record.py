"""From a response to a store and back: what was decoded is what is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.adapters import record, sglang, vllm
from arrow_tq.runs import Run
from tests import engine_responses as engine

PROMPT, COMPLETION = 6, 5
TOKENS = PROMPT + COMPLETION
LAYERS = (1, 2, 4)
ROWS = engine.routing(TOKENS - 1, 3, 4, 64)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    declared = [
        fields.token_ids(),
        fields.logprobs(),
        fields.routed_experts(
            topk=4, num_experts=64, layer_ids=LAYERS, layer_groups=[(1,), (2, 4)], name="routed_experts"
        ),
        fields.indexer_topk(2, topk=3),
    ]
    with arrow_tq.open(tmp_path, capacity_bytes=64 << 20) as store:
        yield store.run("r", fields=declared, tasks=["train"])


def test_a_response_becomes_a_segment(run: Run) -> None:
    chosen = engine.indexer(TOKENS - 1, 2, 3)
    text = engine.encoded(engine.with_dense(ROWS, LAYERS, 6))
    response = engine.generated(PROMPT, COMPLETION, text, indexer_topk=engine.encoded(chosen))
    output = sglang.decode(response, fields=run.fields, prompt_tokens=PROMPT, hidden_layers=6)
    session = run.session("s")
    prompt = np.arange(PROMPT, dtype=np.int32)
    with session.step(version=output.version, sampled=output.sampled) as step:
        step.put("token_ids", prompt, start=0)
        receipts = record(step, output)
    assert [receipt.field for receipt in receipts] == [
        "token_ids",
        "logprobs",
        "routed_experts",
        "indexer_topk",
    ]
    (segment,) = session.finalize(reward=1.0)
    data = run.claim(1).fetch(["token_ids", "logprobs", "routed_experts", "indexer_topk"])
    ids, chances = engine.tokens(COMPLETION)
    assert data["token_ids"][0].tolist() == [*prompt.tolist(), *ids]
    np.testing.assert_array_equal(data["logprobs"][0][PROMPT:], np.array(chances, np.float32))
    np.testing.assert_array_equal(data["routed_experts"][0], ROWS)
    np.testing.assert_array_equal(data["indexer_topk"][0], chosen)
    row = run.sql(f"SELECT version_min, loss_tokens FROM segments WHERE segment_id = '{segment.segment_id}'")
    assert row.to_pylist() == [{"version_min": "3", "loss_tokens": COMPLETION}]


def test_null_rows_stay_holes_until_another_call_covers_them(run: Run) -> None:
    cached = ROWS.copy()
    cached[:4] = -1
    response = engine.chat(
        PROMPT,
        [engine.choice(COMPLETION, cached[PROMPT:].tolist())],
        prompt_routed_experts=cached[:PROMPT].tolist(),
    )
    wanted = {name: field for name, field in run.fields.items() if name != "indexer_topk"}
    output = vllm.decode(response, fields=wanted, prompt_tokens=PROMPT)
    for name, covered in (("holed", 2), ("whole", 4)):
        session = run.session(name)
        with session.step(sampled=output.sampled) as step:
            step.put("token_ids", np.arange(PROMPT), start=0)
            record(step, output)
        with session.step() as step:
            step.put("routed_experts", ROWS[:covered], start=0)
        session.finalize()
    batch = run.claim(2)
    with pytest.raises(errors.Hole, match=r"nobody wrote 2 of its positions: 2\.\.3"):
        batch.fetch(["routed_experts"], rows=[0])
    data = batch.fetch(["routed_experts"], rows=[1])
    np.testing.assert_array_equal(data["routed_experts"][0], ROWS)


def test_an_output_of_several_versions_is_a_step_each(run: Run) -> None:
    versions = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    text = engine.encoded(engine.with_dense(ROWS, LAYERS, 6))
    response = engine.generated(PROMPT, COMPLETION, text, weight_versions=versions)
    wanted = {name: field for name, field in run.fields.items() if name != "indexer_topk"}
    output = sglang.decode(response, fields=wanted, prompt_tokens=PROMPT, hidden_layers=6)
    session = run.session("s")
    with pytest.raises(errors.InvalidInput, match="record each part"), session.step() as step:
        record(step, output)
    for number, part in enumerate(output.by_version()):
        with session.step(version=part.version, sampled=part.sampled) as step:
            if number == 0:
                step.put("token_ids", np.arange(PROMPT), start=0)
            record(step, part)
    session.finalize()
    data = run.claim(1).fetch(["token_ids", "logprobs", "routed_experts"])
    np.testing.assert_array_equal(data["routed_experts"][0], ROWS)
    assert data["token_ids"][0][PROMPT:].tolist() == engine.tokens(COMPLETION)[0]
    row = run.sql("SELECT version_min, version_max, loss_tokens FROM segments").to_pylist()
    assert row == [{"version_min": "3", "version_max": "4", "loss_tokens": COMPLETION}]


def test_an_abort_records_what_there_is(run: Run) -> None:
    aborted = {"meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "3"}}
    output = sglang.decode(aborted, fields=run.fields, prompt_tokens=PROMPT)
    with run.session("s").step() as step:
        step.put("token_ids", np.arange(PROMPT), start=0)
        assert record(step, output) == []
