"""Routing that a model records for given tokens, checked against plain whole-sequence passes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from arrow_tq.demo import model as model_module
from arrow_tq.demo.model import Context, ModelShape, RecordedModel
from arrow_tq.importer.routing import step_routing
from arrow_tq.importer.step_tokens import StepTokens
from arrow_tq_schemas.errors import InvalidInput

pytest.importorskip("torch", reason="needs the extra demo")
pytest.importorskip("transformers", reason="needs the extra demo")


@pytest.fixture(scope="module")
def model() -> RecordedModel:
    return RecordedModel(ModelShape(vocabulary=50, moe_layers=2, experts=8, topk=2, hidden=32, positions=96))


def tokens(count: int, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50, count).astype(np.int32)


def whole(model: RecordedModel, path: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    (fed,) = model.start().feed(path)
    return fed.experts


def test_routing_of_appended_and_rewritten_steps(
    model: RecordedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tokens(20, 1), tokens(12, 2)
    again = tokens(9, 3)
    steps = [
        StepTokens(0, first, (15, 20)),
        StepTokens(20, second, (28, 32)),
        StepTokens(10, again, (14, 19)),
    ]
    one = np.concatenate([first, second])
    two = np.concatenate([first[:10], again])
    truths = [whole(model, one), whole(model, one), whole(model, two)]
    monkeypatch.setattr(model_module, "FORWARD_TOKENS_MAX", 7)
    found = step_routing(model, steps)
    assert [(step.start, len(step.experts)) for step in found] == [(0, 19), (19, 12), (10, 8)]
    for routing, truth, path, step in zip(found, truths, [one, one, two], steps, strict=True):
        assert routing.experts.dtype == np.uint8
        np.testing.assert_array_equal(routing.experts, truth[routing.start : step.end - 1])
        np.testing.assert_allclose(routing.logprobs, reference(model, path, step.sampled), atol=1e-4)


def reference(
    model: RecordedModel, path: npt.NDArray[np.int32], sampled: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """Log-probs by the model's own whole-sequence forward pass."""
    import torch

    with torch.inference_mode():
        logits = model._model(input_ids=torch.tensor(path[None].astype(np.int64))).logits[0].float()
    logs = torch.log_softmax(logits, dim=-1).numpy()
    model._chosen.clear()
    return np.array([logs[at - 1, path[at]] for at in range(*sampled)], np.float32)


def test_sampling_again_reuses_the_prompt(model: RecordedModel) -> None:
    prompt, answer = tokens(10, 4), tokens(3, 5)
    steps = [StepTokens(0, np.concatenate([prompt, answer]), (10, 13)), StepTokens(10, answer, (10, 13))]
    first, second = step_routing(model, steps)
    assert second.start <= 10
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)


def test_the_same_seed_is_the_same_model(model: RecordedModel) -> None:
    path = tokens(30, 6)
    twin = RecordedModel(model.shape, seed=0)
    other = RecordedModel(model.shape, seed=1)
    np.testing.assert_array_equal(whole(model, path), whole(twin, path))
    assert (whole(model, path) != whole(other, path)).any()


def test_routing_is_not_degenerate(model: RecordedModel) -> None:
    experts = whole(model, tokens(90, 7))
    assert experts.shape == (90, 2, 2)
    assert (experts[..., 0] != experts[..., 1]).all()
    assert all(len(np.unique(experts[:, layer])) == 8 for layer in range(2))


def test_bounds_are_errors(model: RecordedModel) -> None:
    context: Context = model.start()
    with pytest.raises(InvalidInput, match="a sequence of 97 tokens: the model takes 96"):
        list(context.feed(tokens(97, 8)))
    with pytest.raises(InvalidInput, match="257 experts: at most 256"):
        RecordedModel(ModelShape(vocabulary=4, experts=257))
