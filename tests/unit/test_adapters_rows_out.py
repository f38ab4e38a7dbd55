"""SkyRL's wire form and AReaL's flat rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq.adapters import areal, skyrl
from arrow_tq.adapters.replay import Switch
from arrow_tq_schemas.errors import MalformedMessage, RowCountMismatch
from tests.frameworks import Scene, embedded


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = embedded(tmp_path)
    with made.store:
        yield made


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(skyrl.DTYPES), st.tuples(*[st.integers(0, 4)] * 3), st.integers(0, 1 << 16))
def test_the_wire_form_goes_through_json(dtype: str, shape: tuple[int, int, int], seed: int) -> None:
    edges = np.iinfo(dtype)
    experts = np.random.default_rng(seed).integers(edges.min, edges.max, shape, dtype, endpoint=True)
    wire = json.loads(json.dumps(skyrl.encode(experts)))
    assert sorted(wire) == ["data", "dtype", "shape"]
    found = skyrl.decode(wire)
    assert found.dtype == experts.dtype
    np.testing.assert_array_equal(found, experts)
    np.testing.assert_array_equal(skyrl.decode({**wire, "dtype": f"torch.{wire['dtype']}"}), experts)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"dtype": "object"},
        {"shape": [1, 2]},
        {"shape": [1, 2, -3]},
        {"shape": [1, 2, 4]},
        {"data": "%%%"},
        {"data": ""},
    ],
)
def test_wires_that_lie_are_refused(change: dict[str, object]) -> None:
    wire = skyrl.encode(np.zeros((1, 2, 3), np.int32))
    with pytest.raises(MalformedMessage):
        skyrl.decode({**wire, **change})


def test_skyrl_outputs(scene: Scene) -> None:
    made = skyrl.outputs(scene.batch, Switch.ROUTING, rows=[3, 1])
    for place, row in enumerate((3, 1)):
        truth = scene.truth[row]
        np.testing.assert_array_equal(made["rollout_expert_indices"][place], truth.experts)
        assert made["rollout_expert_indices"][place].dtype == np.int32
        assert made["rollout_logprobs"][place] == truth.logprobs[scene.prompt(row) :].tolist()
    assert list(skyrl.outputs(scene.batch, Switch.LOGPROBS)) == ["rollout_logprobs"]
    assert skyrl.outputs(scene.batch, Switch.OFF) == {}


def test_areal_trajectories(scene: Scene) -> None:
    made = areal.trajectories(scene.batch, Switch.ROUTING)
    for one, truth in zip(made, scene.truth, strict=True):
        np.testing.assert_array_equal(one["input_ids"], truth.tokens)
        np.testing.assert_array_equal(one["logprobs"], truth.logprobs)
        assert one["loss_mask"].sum() == sum(end - start for _, start, end in truth.turns)
        assert one["routed_experts"].dtype == np.int32
        assert one["routed_experts"].shape == (len(truth.tokens) - 1, 12)
        np.testing.assert_array_equal(areal.unflatten(one["routed_experts"], 6, 2), truth.experts)
    assert "routed_experts" not in areal.trajectories(scene.batch, Switch.LOGPROBS)[0]
    assert areal.trajectories(scene.batch, Switch.OFF) == [{}] * 5
    with pytest.raises(RowCountMismatch, match=r"expected \[rows, 5 x 2\]"):
        areal.unflatten(made[0]["routed_experts"], 5, 2)
