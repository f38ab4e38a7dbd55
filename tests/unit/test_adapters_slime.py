"""slime and Miles: samples and train dicts from a batch, and queues that hold routing to be fetched."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch")

import torch

from arrow_tq.adapters import slime
from arrow_tq.adapters.replay import RankLayout, RoutingSource, Switch
from arrow_tq_schemas.errors import InvalidInput, Misaligned, RowCountMismatch
from tests.doubles.slime import Replay, RoutingReplay, Sample
from tests.frameworks import LAYER_IDS, Scene, embedded
from tests.moe_models import Chunk

TOPK = 2


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = embedded(tmp_path)
    with made.store:
        yield made
    RoutingReplay.clear_all()
    RoutingReplay.all_routing_replays.clear()


def samples(scene: Scene) -> list[Sample]:
    return [
        Sample(tokens=truth.tokens.tolist(), response_length=len(truth.tokens) - scene.prompt(row))
        for row, truth in enumerate(scene.truth)
    ]


def test_samples_get_response_only_values_and_references(scene: Scene) -> None:
    made = samples(scene)
    slime.fill_samples(made, scene.batch, Switch.ROUTING)
    for row, (sample, truth) in enumerate(zip(made, scene.truth, strict=True)):
        start = scene.prompt(row)
        assert sample.rollout_log_probs == truth.logprobs[start:].tolist()
        mask = np.zeros(len(truth.tokens), int)
        for _, prompt_end, end in truth.turns:
            mask[prompt_end:end] = 1
        assert sample.loss_mask == mask[start:].tolist()
        assert sample.weight_versions == ["1"]
        reference = sample.rollout_routed_experts
        assert reference.shape == truth.experts.shape
        assert len(reference) == len(sample.tokens) - 1
        assert reference.row == row
        assert len(pickle.dumps(reference)) < 1024
    arrays = slime.routed_experts(scene.batch)
    for array, truth in zip(arrays, scene.truth, strict=True):
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, truth.experts)


def test_off_touches_nothing_and_logprobs_no_routing(scene: Scene) -> None:
    made = samples(scene)
    before = copy.deepcopy(made)
    slime.fill_samples(made, scene.batch, Switch.OFF)
    assert made == before
    assert slime.train_fields(scene.batch, Switch.OFF) == {}
    slime.fill_samples(made, scene.batch, Switch.LOGPROBS)
    assert all(sample.rollout_routed_experts is None and sample.rollout_log_probs for sample in made)
    source = RoutingSource(scene.batch, device="cpu")
    chunk = Chunk((1, 2), (), RoutingReplay, 64, TOPK, attribute="routing_replay")
    for switch in (Switch.OFF, Switch.LOGPROBS):
        assert slime.record_routing([chunk], source, [(0,)], RankLayout(), switch) == []
    assert all(not replay.top_indices_list for replay in RoutingReplay.all_routing_replays)
    assert RoutingReplay.lazy_resources == []


def test_what_a_sample_has_already_stays(scene: Scene) -> None:
    made = samples(scene)[:1]
    made[0].loss_mask = [0] * made[0].response_length
    made[0].weight_versions = ["mine"]
    slime.fill_samples(made, scene.batch, Switch.LOGPROBS)
    assert made[0].loss_mask == [0] * made[0].response_length
    assert made[0].weight_versions == ["mine"]


def test_samples_of_other_segments_are_refused(scene: Scene) -> None:
    made = samples(scene)
    with pytest.raises(Misaligned):
        slime.fill_samples(made[:2], scene.batch, Switch.ROUTING, rows=[1, 0])
    slime.fill_samples([made[1], made[0]], scene.batch, Switch.ROUTING, rows=[1, 0])
    made[0].response_length -= 1
    with pytest.raises(RowCountMismatch, match=r"its response has .* tokens, the sample's"):
        slime.fill_samples(made[:1], scene.batch, Switch.ROUTING)
    with pytest.raises(InvalidInput, match="2 samples, 1 rows"):
        slime.fill_samples(made[:2], scene.batch, Switch.ROUTING, rows=[0])


def test_the_train_dict(scene: Scene) -> None:
    columns = slime.train_fields(scene.batch, Switch.ROUTING, rows=[4, 2])
    assert columns["tokens"] == [scene.truth[row].tokens.tolist() for row in (4, 2)]
    for row, place in ((4, 0), (2, 1)):
        start = scene.prompt(row)
        assert columns["total_lengths"][place] == len(scene.truth[row].tokens)
        assert columns["response_lengths"][place] == len(scene.truth[row].tokens) - start
        assert columns["rollout_log_probs"][place] == scene.truth[row].logprobs[start:].tolist()
        assert sum(columns["loss_masks"][place]) == sum(
            end - begin for _, begin, end in scene.truth[row].turns
        )
        assert columns["rollout_routed_experts"][place].row == row
    assert "rollout_routed_experts" not in slime.train_fields(scene.batch, Switch.LOGPROBS)


def test_references_of_one_batch_make_a_source(scene: Scene) -> None:
    refs = slime.train_fields(scene.batch, Switch.ROUTING)["rollout_routed_experts"]
    source = slime.source_of(refs, rank=1, world=4, capacity_bytes=1000)
    assert (source.pointer.rank, source.pointer.world, source.capacity_bytes) == (1, 4, 1000)
    with pytest.raises(InvalidInput, match="0 references"):
        slime.source_of([], 0, 1)


@pytest.mark.parametrize("cp", [1, 2])
def test_slime_reads_three_times_what_was_fetched_once(scene: Scene, cp: int) -> None:
    """Old log-probs, training forward, recomputation; hybrid layers, two virtual stages, padding."""
    chunks = [
        Chunk((0, 1, 2), (0,), RoutingReplay, 64, TOPK, "routing_replay"),
        Chunk((5, 6), (), RoutingReplay, 64, TOPK, "routing_replay", prediction=(10,)),
    ]
    source = RoutingSource(scene.batch, device="cpu")
    micro_batches = [(0, 3), (1,), (4, 2)]
    layout = slime.rank_layout(cp_rank=cp - 1, cp_size=cp, pad_multiplier=8)
    routers = slime.record_routing(chunks, source, micro_batches, layout, Switch.ROUTING)
    assert [router.layer_id for router in routers] == [1, 2, 5, 6]
    assert source.fetches == 0
    for stages in (("forward",), ("forward", "backward")):
        RoutingReplay.begin_lazy_pass(stages[-1])
        for rows in micro_batches:
            index = layout.index([len(scene.truth[row].tokens) for row in rows])
            for router in routers:
                for stage in stages:
                    replay = router.replay
                    assert isinstance(replay, RoutingReplay)
                    read = replay.pop_forward if stage == "forward" else replay.pop_backward
                    check_rows(read(), scene, rows, router.layer_id, index)
        for router in routers:
            router.replay.clear_forward()
    assert source.fetches == len(micro_batches)
    prediction = [replay for replay in RoutingReplay.all_routing_replays if not replay.top_indices_list]
    assert len(prediction) == 1
    RoutingReplay.clear_all()
    assert source.kept_bytes == 0


def test_miles_queues_answer_to_a_device(scene: Scene) -> None:
    chunk = Chunk(LAYER_IDS, (), Replay, 64, TOPK, attribute="routing_replay")
    source = RoutingSource(scene.batch, device="cpu")
    routers = slime.record_routing([chunk], source, [(2,), (0, 1)], RankLayout(), Switch.ROUTING)
    assert source.fetches == 0
    for rows in ((2,), (0, 1)):
        index = RankLayout().index([len(scene.truth[row].tokens) for row in rows])
        for router in routers:
            found = router.replay.pop_forward()
            assert found.dtype == torch.int64
            check_rows(found, scene, rows, router.layer_id, index)
    assert source.fetches == 2


def check_rows(
    found: torch.Tensor, scene: Scene, rows: tuple[int, ...], layer: int, index: np.ndarray
) -> None:
    place = LAYER_IDS.index(layer)
    packed = np.concatenate(
        [np.vstack([scene.truth[row].experts[:, place], np.zeros((1, TOPK), np.uint8)]) for row in rows]
    )
    real = index >= 0
    assert len(found) == len(index)
    np.testing.assert_array_equal(found.numpy()[real], packed[index[real]])
