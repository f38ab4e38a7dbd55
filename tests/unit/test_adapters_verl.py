"""verl's tensors: padded beside left-padded prompts, jagged in a TensorDict, and which rows are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch")

import torch

from arrow_tq.adapters import verl
from arrow_tq.adapters.replay import Switch
from arrow_tq_schemas.errors import InvalidField, InvalidInput, RowCountMismatch
from arrow_tq_schemas.fields import Field
from tests.frameworks import Scene, embedded


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = embedded(tmp_path)
    with made.store:
        yield made


def test_padded_tensors_stand_beside_the_tokens(scene: Scene) -> None:
    made = verl.padded(scene.batch, Switch.ROUTING, prompt_length=16, response_length=90, rows=[2, 0])
    experts, mask, logprobs = (made[name] for name in ("routed_experts", "routed_mask", "rollout_log_probs"))
    assert (experts.dtype, tuple(experts.shape)) == (torch.int16, (2, 106, 6, 2))
    assert (logprobs.dtype, tuple(logprobs.shape)) == (torch.float32, (2, 90))
    for place, row in enumerate((2, 0)):
        truth, prompt = scene.truth[row], scene.prompt(row)
        start, rows = 16 - prompt, len(truth.experts)
        np.testing.assert_array_equal(experts[place, start : start + rows].numpy(), truth.experts)
        assert not experts[place, :start].any()
        assert not experts[place, start + rows :].any()
        assert mask[place].nonzero().flatten().tolist() == list(range(start, start + rows))
        response = len(truth.tokens) - prompt
        np.testing.assert_array_equal(logprobs[place, :response].numpy(), truth.logprobs[prompt:])
        assert not logprobs[place, response:].any()
    with pytest.raises(InvalidInput, match="there is room for 16 and 1"):
        verl.padded(scene.batch, Switch.ROUTING, 16, 1)


def test_the_switch_of_padded_tensors(scene: Scene) -> None:
    assert verl.padded(scene.batch, Switch.OFF, 16, 90) == {}
    assert list(verl.padded(scene.batch, Switch.LOGPROBS, 16, 90)) == ["rollout_log_probs"]


def test_jagged_tensors(scene: Scene) -> None:
    pytest.importorskip("tensordict", reason="needs tensordict")
    made = verl.jagged(scene.batch, Switch.ROUTING)
    assert made.batch_size == torch.Size([5])
    parts = {name: made[name].unbind() for name in made.keys()}  # noqa: SIM118
    assert sorted(parts) == ["input_ids", "rollout_log_probs", "routed_experts", "routed_mask"]
    for row, truth in enumerate(scene.truth):
        tokens = len(truth.tokens)
        assert parts["input_ids"][row].tolist() == truth.tokens.tolist()
        np.testing.assert_array_equal(parts["rollout_log_probs"][row].numpy(), truth.logprobs)
        experts = parts["routed_experts"][row]
        assert (experts.dtype, len(experts)) == (torch.int16, tokens)
        np.testing.assert_array_equal(experts[:-1].numpy(), truth.experts)
        assert not experts[-1].any()
        assert parts["routed_mask"][row].tolist() == [True] * (tokens - 1) + [False]
        again, mask = verl.aligned(experts.numpy(), tokens)
        np.testing.assert_array_equal(again, experts.numpy())
        assert mask.tolist() == parts["routed_mask"][row].tolist()
    assert list(verl.jagged(scene.batch, Switch.OFF).keys()) == []
    assert "routed_experts" not in verl.jagged(scene.batch, Switch.LOGPROBS, rows=[1]).keys()  # noqa: SIM118


@pytest.mark.parametrize("rows", [6, 7])
def test_a_row_a_token_or_one_less(rows: int) -> None:
    experts = np.arange(1, rows * 4 + 1, dtype=np.int16).reshape(rows, 2, 2)
    made, mask = verl.aligned(experts, 7)
    np.testing.assert_array_equal(made[:6], experts[:6])
    assert not made[6].any()
    assert mask.tolist() == [True] * 6 + [False]


@pytest.mark.parametrize("shape", [(5, 2, 2), (8, 2, 2), (7, 4)])
def test_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RowCountMismatch, match="for 7 tokens: expected 6 or 7 rows"):
        verl.aligned(np.zeros(shape, np.int16), 7)


def test_ids_must_fit_int16() -> None:
    with pytest.raises(InvalidField, match="40000 experts do not fit int16"):
        verl._check_int16(Field("r", "uint16", (1, 2), layer_axis=0, num_experts=40000))
