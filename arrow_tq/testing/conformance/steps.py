"""Writing steps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from arrow_tq import Field, errors, fields
from arrow_tq.interface import Store
from arrow_tq.testing.rollouts import LAYER_IDS
from arrow_tq.testing.scenes import chunks_stored, fill, open_run, wait_until


class StepConformance:
    """Writing steps."""

    def test_what_was_put_is_fetched_bit_by_bit(self, store: Store) -> None:
        run = open_run(store)
        kept = fill(run, 4)
        batch = run.claim(10)
        assert batch.segment_ids == list(kept)
        data = batch.fetch(["token_ids", "logprobs", "routed_experts"])
        for index, rollout in enumerate(kept.values()):
            np.testing.assert_array_equal(data["token_ids"][index], rollout.tokens)
            np.testing.assert_array_equal(data["logprobs"][index], rollout.logprobs)
            np.testing.assert_array_equal(data["routed_experts"][index], rollout.experts)
            assert data["routed_experts"][index].dtype == np.uint8
        packed = data["routed_experts"].packed
        assert packed.shape[0] == sum(len(rollout.tokens) for rollout in kept.values())
        assert not packed[data.offsets[1:] - 1].any(), "the last row of each segment is fill"

    def test_layers_are_global_ids_in_any_order(self, store: Store) -> None:
        run = open_run(store)
        ((_, rollout),) = fill(run, 1).items()
        batch = run.claim(1)
        for wanted in ([9, 1], [4, 5], [2], list(LAYER_IDS), [1, 4, 2]):
            places = [LAYER_IDS.index(layer) for layer in wanted]
            data = batch.fetch("routed_experts", layers=wanted)
            np.testing.assert_array_equal(data["routed_experts"][0], rollout.experts[:, places])
            assert data["routed_experts"].layers == tuple(wanted)
        with pytest.raises(errors.InvalidField, match=r"layers \[3\]"):
            batch.fetch("routed_experts", layers=[1, 3])

    def test_rows_go_into_the_callers_buffer_and_are_widened(self, store: Store) -> None:
        run = open_run(store)
        kept = list(fill(run, 3).values())
        batch = run.claim(3)
        total = len(kept[2].tokens) + len(kept[0].tokens)
        out = np.full((total, 2, 2), -7, np.int32)
        data = batch.fetch("routed_experts", layers=[4, 9], rows=[2, 0], out={"routed_experts": out})
        assert data["routed_experts"].packed is out
        for index, rollout in enumerate((kept[2], kept[0])):
            np.testing.assert_array_equal(data["routed_experts"][index], rollout.experts[:, [2, 5]])
        with pytest.raises(errors.InvalidField, match="expected a writable array of shape"):
            batch.fetch("token_ids", out={"token_ids": np.empty(3, np.int32)})
        with pytest.raises(errors.InvalidField, match="without loss"):
            batch.fetch("token_ids", rows=[0], out={"token_ids": np.empty(len(kept[0].tokens), np.int16)})

    def test_expected_tokens_are_compared(self, store: Store) -> None:
        run = open_run(store)
        kept = list(fill(run, 2).values())
        batch = run.claim(2)
        tokens = [rollout.tokens for rollout in kept]
        batch.fetch("logprobs", expect_tokens=tokens)
        batch.fetch("logprobs", expect_tokens=np.concatenate(tokens))
        wrong = [tokens[0], tokens[1].copy()]
        wrong[1][3] += 1
        with pytest.raises(errors.Misaligned, match="position 3"):
            batch.fetch("logprobs", expect_tokens=wrong)
        with pytest.raises(errors.Misaligned, match="expected"):
            batch.fetch("logprobs", expect_tokens=[tokens[0], tokens[1][:-1]])

    def test_a_step_that_fails_leaves_nothing(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        with pytest.raises(ZeroDivisionError), session.step(sampled=(0, 2)) as step:
            step.put("token_ids", [1, 2], start=0)
            step.put("logprobs", np.zeros(2), start=0)
            raise ZeroDivisionError
        assert run.sql("SELECT count(*) AS n FROM steps").column("n").to_pylist() == [0]
        wait_until(lambda: chunks_stored(store) == 0)

    def test_fields_that_end_apart_are_refused_with_both_counts(self, store: Store) -> None:
        run = store.run("two", fields=[fields.token_ids(), Field("weights", "float32")])
        session = run.session("s")
        with pytest.raises(errors.RowCountMismatch, match=r"(?s)(?=.*7)(?=.*5)"), session.step() as step:
            step.put("token_ids", np.arange(7), start=0)
            step.put("weights", np.zeros(5, np.float32), start=0)
        assert run.sql("SELECT count(*) AS n FROM steps").column("n").to_pylist() == [0]
        wait_until(lambda: chunks_stored(store) == 0)

    def test_a_retried_step_is_stored_once(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        for _ in range(2):
            with session.step(id="call-1", sampled=(1, 3)) as step:
                step.put("token_ids", [5, 6, 7], start=0)
                step.put("logprobs", [-1.0, -2.0], start=1)
        assert run.sql("SELECT step_id FROM steps").column(0).to_pylist() == ["call-1"]
        (segment,) = session.finalize()
        data = run.claim(1).fetch(["token_ids", "logprobs"])
        assert data["token_ids"][0].tolist() == [5, 6, 7]
        assert segment.loss_tokens == 2

    def test_receipts_of_another_writer_are_attached(self, store: Store) -> None:
        run = open_run(store)
        writer = run.session("s").step(id="engine")
        receipt = writer.put("token_ids", [1, 2, 3], start=0)
        writer.flush()
        with run.session("s").step() as step:
            step.attach(receipt.to_json())
        assert run.session("s").finalize()[0].num_tokens == 3
        assert run.claim(1).fetch("token_ids")["token_ids"][0].tolist() == [1, 2, 3]

    def test_values_out_of_range_name_field_value_and_position(self, store: Store) -> None:
        run = open_run(store)
        experts = np.zeros((4, 6, 2), np.int32)
        experts[2, 1, 0] = 64
        with (
            pytest.raises(errors.ValueOutOfRange, match=r"(?s)routed_experts.*64.*12"),
            run.session("s").step() as step,
        ):
            step.put("routed_experts", experts, start=10)
        assert chunks_stored(store) == 0

    def test_a_put_of_no_rows_writes_no_chunk(self, store: Store) -> None:
        run = open_run(store)
        session = run.session("s")
        with session.step() as step:
            step.put("token_ids", np.empty(0, np.int32), start=0)
        assert chunks_stored(store) == 0
        segments = session.finalize()
        assert [segment.num_tokens for segment in segments] in ([], [0])

    def test_messages_survive_as_they_are(self, store: Store) -> None:
        run = open_run(store)
        messages = [{"role": "user", "content": "a\ud800b"}, {"role": "tool", "content": None, "extra": ""}]
        with run.session("s").step(messages=messages) as step:
            step.put("token_ids", [1], start=0)
        with run.session("s").step() as step:
            step.put("token_ids", [2], start=1)
        stored = run.sql("SELECT messages FROM steps ORDER BY step_index").column(0).to_pylist()
        assert [json.loads(text) for text in stored] == [messages, []]
