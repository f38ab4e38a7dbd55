"""Megatron's RouterReplay, the real class where it is installed: binding, checks, queues, recomputation."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch")

import torch

from arrow_tq.adapters.megatron import MegatronReplay, Pass, replay_list
from arrow_tq.adapters.replay import RankLayout, RoutingSource, Switch
from arrow_tq.adapters.routers import live_routers
from arrow_tq.testing import rollouts
from arrow_tq_schemas.errors import Conflict, InvalidField, InvalidInput, Misaligned, ValueOutOfRange
from tests.frameworks import embedded
from tests.moe_models import HIDDEN, Chunk, Router

EXPERTS, TOPK, ROWS = 16, 3, 6
DENSE = (0, 3, 7, 8)
REAL = "megatron.core.transformer.moe.router_replay"


@pytest.fixture(params=["tests.doubles.router_replay", REAL], ids=["double", "megatron-core"])
def module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    if request.param == REAL:
        pytest.importorskip(REAL, reason="megatron-core is not installed: only its double is tested")
    found = importlib.import_module(request.param)
    yield found
    found.RouterReplay.global_router_replay_instances.clear()


def chunk(module: ModuleType, layers: range, prediction: tuple[int, ...] = ()) -> Chunk:
    return Chunk(layers, DENSE, module.RouterReplay, EXPERTS, TOPK, prediction=prediction)


def routing(layers: tuple[int, ...], seed: int, rows: int = ROWS) -> dict[int, Any]:
    random = np.random.default_rng(seed)
    return {
        layer: torch.from_numpy(
            random.permuted(np.tile(np.arange(EXPERTS), (rows, 1)), axis=1)[:, :TOPK].copy()
        )
        for layer in layers
    }


def states(seed: int, rows: int = ROWS) -> Any:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def chosen(router: Router, read: int) -> list[list[int]]:
    return router.chosen[read].tolist()


# -- who is bound ----------------------------------------------------------------------------------


def test_routers_are_bound_by_layer_number_in_uneven_hybrid_virtual_stages(module: ModuleType) -> None:
    chunks = [chunk(module, range(3)), chunk(module, range(5, 10), prediction=(10,))]
    replay = MegatronReplay(chunks, EXPERTS, TOPK)
    assert replay.layer_ids() == (1, 2, 5, 6, 9)
    assert replay.layer_ids(0) == (1, 2)
    assert replay.layer_ids(1) == (5, 6, 9)
    other_rank = MegatronReplay([chunk(module, range(3, 5))], EXPERTS, TOPK)
    assert other_rank.layer_ids() == (4,)


def test_the_order_of_instances_does_not_matter(module: ModuleType) -> None:
    """A dead model's routers, another model's and those of prediction layers are in Megatron's list too."""
    chunk(module, range(5))
    late, early = chunk(module, range(5, 10), prediction=(10,)), chunk(module, range(3))
    replay = MegatronReplay([early, late], EXPERTS, TOPK)
    wanted = routing((1, 2, 5, 6, 9), seed=1)
    for index, part in enumerate((early, late)):
        with replay.forward(wanted, Pass.FORWARD_ONLY, chunk=index):
            part(states(index))
        for layer, router in part.routers().items():
            assert chosen(router, 0) == wanted[layer].tolist()
    touched = {id(router.replay) for router in replay.routers}
    for instance in module.RouterReplay.global_router_replay_instances:
        if id(instance) not in touched:
            assert instance.target_topk_idx is None
            assert instance.replay_backward_list == []
            assert instance.router_replay_action is None


def test_prediction_layers_choose_for_themselves(module: ModuleType) -> None:
    part = chunk(module, range(9, 10), prediction=(10,))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    with replay.forward(routing((9, 10), seed=2), Pass.FORWARD_ONLY):
        predicting = part.mtp[0].transformer_layer
        predicting(states(0))
    scores = states(0) + torch.tanh(predicting.dense(states(0)))
    own = torch.topk(scores @ predicting.router.weight.T, TOPK, dim=1).indices
    assert predicting.router.chosen[0].tolist() == own.tolist()


def test_off_and_logprobs_leave_the_model_alone(module: ModuleType) -> None:
    for switch in (Switch.OFF, Switch.LOGPROBS):
        part = chunk(module, range(3))
        replay = MegatronReplay([part], EXPERTS, TOPK, switch)
        assert replay.routers == []
        assert all(not router._forward_pre_hooks for router in part.routers().values())
        with replay.forward({}, Pass.RECOMPUTED):
            part(states(0))
        replay.finish()
        replay.close()
        for router in part.routers().values():
            instance = router.router_replay
            assert instance.replay_backward_list == []
            assert instance.router_replay_action is None


def test_a_model_without_replay_and_layers_claimed_twice(module: ModuleType) -> None:
    with pytest.raises(InvalidInput, match="no router with 'router_replay'"):
        MegatronReplay([chunk(module, range(1))], EXPERTS, TOPK)
    with pytest.raises(
        Conflict, match=r"layer 1 has two routers: 'layers.1.router' of chunk 0 and .* chunk 1"
    ):
        live_routers([chunk(module, range(3)), chunk(module, range(1, 3))], "router_replay")
    part = chunk(module, range(3))
    part.routers()[1].layer_number = None
    with pytest.raises(InvalidInput, match=r"'layers.1.router' of chunk 0 has layer_number None"):
        live_routers([part], "router_replay")


# -- what is handed over -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, EXPERTS])
def test_ids_are_checked_before_the_gather(module: ModuleType, value: int) -> None:
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    wanted = routing((1, 2), seed=3)
    wanted[2][4, 1] = value
    with (
        pytest.raises(ValueOutOfRange, match=f"layer 2, row 4: expert {value}, expected 0 to 15"),
        replay.forward(wanted, Pass.FORWARD_ONLY),
    ):
        raise AssertionError("the forward must not begin")
    assert all(not router.replay.replay_backward_list for router in replay.routers)


def test_shapes_and_missing_layers_are_refused(module: ModuleType) -> None:
    replay = MegatronReplay([chunk(module, range(3))], EXPERTS, TOPK)
    wanted = routing((1, 2), seed=4)
    with (
        pytest.raises(InvalidInput, match=r"layer 2 \('layers.2.router'\) has no routing; there is \[1\]"),
        replay.forward({1: wanted[1]}, Pass.FORWARD_ONLY),
    ):
        pass
    for wrong in (wanted[2][:, :2], wanted[2].float(), wanted[2][0]):
        with (
            pytest.raises(
                InvalidField, match=r"layer 2: routing is .* expected integers of \[local rows, 3\]"
            ),
            replay.forward({1: wanted[1], 2: wrong}, Pass.FORWARD_ONLY),
        ):
            pass


def test_fewer_rows_than_the_router_sees_are_an_error(module: ModuleType) -> None:
    """``gather`` takes an index with fewer rows and says nothing."""
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    with (
        pytest.raises(Misaligned, match="layer 1: its router sees 6 rows, routing was laid out for 5"),
        replay.forward(routing((1, 2), seed=5, rows=ROWS - 1), Pass.FORWARD_ONLY),
    ):
        part(states(0))
    replay.close()
    part(states(0))


def test_int32_and_uint8_are_widened(module: ModuleType) -> None:
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    wanted = routing((1, 2), seed=6)
    given = {1: wanted[1].to(torch.uint8), 2: wanted[2].int()}
    with replay.forward(given, Pass.FORWARD_ONLY):
        part(states(0))
    assert {layer: chosen(router, 0) for layer, router in part.routers().items()} == {
        layer: ids.tolist() for layer, ids in wanted.items()
    }


# -- passes ------------------------------------------------------------------------------------------


def test_forward_only_passes_leave_nothing_for_backward(module: ModuleType) -> None:
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    for seed in range(3):
        with replay.forward(routing((1, 2), seed), Pass.FORWARD_ONLY):
            part(states(seed))
    for router in part.routers().values():
        instance: Any = router.router_replay
        assert instance.replay_backward_list == []
        assert instance.target_topk_idx is None
        assert instance.router_replay_action is None
    replay.finish()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_recomputation_reads_in_the_order_of_forwards(module: ModuleType, ahead: int) -> None:
    """One forward, one backward, with ``ahead`` micro-batches in flight and log-prob passes before."""
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    wanted = [routing((1, 2), 10 + seed) for seed in range(4)]
    for one in wanted:
        with replay.forward(one, Pass.FORWARD_ONLY), torch.no_grad():
            part(states(0))
    flight: list[Any] = []
    for seed, one in enumerate(wanted):
        with replay.forward(one, Pass.RECOMPUTED):
            flight.append(part(states(seed), recompute=True).sum())
        if len(flight) == ahead:
            flight.pop(0).backward()
    for loss in flight:
        loss.backward()
    replay.finish()
    for layer, router in part.routers().items():
        reads = [chosen(router, read) for read in range(len(router.chosen))]
        ids = [one[layer].tolist() for one in wanted]
        assert len(reads) == 3 * len(wanted)
        assert reads[:4] == ids
        assert sorted(reads[4:]) == sorted(ids + ids)
        later = reads[4:]
        assert [at for at in ids if later.count(at) == 2] == ids
        assert router.router_replay.router_replay_action is None


def test_recomputation_of_virtual_stages_does_not_mix(module: ModuleType) -> None:
    chunks = [chunk(module, range(3)), chunk(module, range(4, 7))]
    replay = MegatronReplay(chunks, EXPERTS, TOPK)
    wanted = [routing((1, 2, 4, 5, 6), 20 + seed) for seed in range(2)]
    losses = []
    for one in wanted:
        hidden = states(0)
        for index, part in enumerate(chunks):
            with replay.forward(one, Pass.RECOMPUTED, chunk=index):
                hidden = part(hidden, recompute=True)
        losses.append(hidden.sum())
    for loss in losses:
        loss.backward()
    replay.finish()
    for part in chunks:
        for layer, router in part.routers().items():
            first, second = (one[layer].tolist() for one in wanted)
            assert [chosen(router, read) for read in range(4)] == [first, second, first, second]


def test_training_without_recomputation_keeps_no_queue(module: ModuleType) -> None:
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    with replay.forward(routing((1, 2), 30), Pass.TRAINING):
        loss = part(states(0)).sum()
    loss.backward()
    replay.finish()
    assert all(len(router.chosen) == 1 for router in part.routers().values())


def test_routing_that_no_backward_read_is_told(module: ModuleType) -> None:
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    with replay.forward(routing((1, 2), 31), Pass.RECOMPUTED):
        part(states(0))
    with pytest.raises(
        Conflict, match="2 layers kept routing that no backward read, such as layer 1: 1 of 1"
    ):
        replay.finish()
    replay.finish()


def test_a_backward_that_nothing_was_queued_for_is_told(module: ModuleType) -> None:
    part = chunk(module, range(3))
    replay = MegatronReplay([part], EXPERTS, TOPK)
    with replay.forward(routing((1, 2), 32), Pass.RECOMPUTED):
        loss = part(states(0), recompute=True).sum()
    loss.backward(retain_graph=False)
    with pytest.raises(Conflict, match="layer 1: recomputation asks for routing that no forward queued"):
        part(states(0))


# -- from the store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["tensors", "fetched late"])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_a_claimed_batch_is_replayed_rank_by_rank(
    module: ModuleType, tmp_path: Path, cp_rank: int, late: bool
) -> None:
    """Two virtual stages of a hybrid model, zig-zag and sequence cuts, log-probs and recomputation."""
    scene = embedded(tmp_path, 4)
    layout = RankLayout(cp_rank=cp_rank, cp_size=2, sp_rank=1, sp_size=2, row_multiple=4)
    chunks = [
        Chunk(layers, (0, 3), module.RouterReplay, rollouts.EXPERTS, rollouts.TOPK)
        for layers in (range(4), range(4, 7))
    ]
    replay = MegatronReplay(chunks, rollouts.EXPERTS, rollouts.TOPK)
    with scene.store:
        source = RoutingSource(scene.batch, device="cpu")
        wanted: dict[int, list[list[list[int]]]] = {layer: [] for layer in replay.layer_ids()}
        for rows in ((3, 1), (0,)):
            micro = source.micro_batch(rows, layout, replay.layer_ids())
            for layer in replay.layer_ids():
                wanted[layer].append(micro.experts()[:, micro.place(layer)].tolist())
            given = micro.by_layer() if late else micro
            hidden = states(0, micro.local_rows)
            for index, part in enumerate(chunks):
                with replay.forward(given, Pass.FORWARD_ONLY, chunk=index), torch.no_grad():
                    part(hidden)
                with replay.forward(given, Pass.RECOMPUTED, chunk=index):
                    hidden = part(hidden, recompute=True)
            hidden.sum().backward()
        replay.finish()
        assert source.fetches == 2
    for part in chunks:
        for layer, router in part.routers().items():
            reads = [chosen(router, read) for read in range(len(router.chosen))]
            assert reads == [ids for ids in wanted[layer] for _ in range(3)]


def test_a_field_of_another_model_is_refused(module: ModuleType, tmp_path: Path) -> None:
    scene = embedded(tmp_path, 1)
    part = Chunk((1, 2), (), module.RouterReplay, 32, rollouts.TOPK)
    replay = MegatronReplay([part], 32, rollouts.TOPK)
    with scene.store:
        micro = RoutingSource(scene.batch, device="cpu").micro_batch((0,))
        with (
            pytest.raises(InvalidField, match="has top 2 of 64 experts, the model top 2 of 32"),
            replay.forward(micro.by_layer(), Pass.FORWARD_ONLY),
        ):
            pass
        with pytest.raises(ValueOutOfRange), replay.forward(micro, Pass.FORWARD_ONLY):
            pass


# -- for code that calls set_replay_data itself -------------------------------------------------------


def test_the_list_is_in_the_order_of_instances(module: ModuleType) -> None:
    late, early = chunk(module, range(5, 10)), chunk(module, range(3))
    wanted = routing((1, 2, 5, 6, 9), seed=7)
    instances = module.RouterReplay.global_router_replay_instances
    made = replay_list([early, late], wanted, instances)
    module.RouterReplay.set_replay_data(made)
    for part in (early, late):
        for layer, router in part.routers().items():
            assert router.router_replay.target_topk_idx is wanted[layer]
    with pytest.raises(InvalidInput, match=r"layers \[9\] have no routing"):
        replay_list([early, late], {layer: wanted[layer] for layer in (1, 2, 5, 6)}, instances)
    with pytest.raises(Conflict, match=r"instances \[0, 1, 2\] of 5 belong to no decoder layer"):
        replay_list([early], wanted, instances)


def test_megatrons_own_router_function_replays() -> None:
    """Probabilities come from this model's scores at the recorded experts; the map has exactly those."""
    module = pytest.importorskip(REAL, reason="megatron-core is not installed")
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    part = Chunk(range(1, 2), (), module.RouterReplay, EXPERTS, TOPK)
    replay = MegatronReplay([part], EXPERTS, TOPK)
    router = part.routers()[1]
    wanted = routing((1,), seed=8)
    logits = torch.randn(ROWS, EXPERTS)
    with replay.forward(wanted, Pass.FORWARD_ONLY):
        probs, chosen_map = topk_routing_with_score_function(
            logits, TOPK, use_pre_softmax=False, router_replay=router.router_replay
        )
    module.RouterReplay.global_router_replay_instances.clear()
    expected = torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, wanted[1], True)
    assert chosen_map.equal(expected)
    weights = torch.softmax(logits.gather(1, wanted[1]), dim=1)
    torch.testing.assert_close(probs.gather(1, wanted[1]), weights)
