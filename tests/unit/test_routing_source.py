"""Routing fetched late: once for all layers, kept under a bound, fetched again, and a pickle of nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch")

import torch

import arrow_tq
from arrow_tq import fields
from arrow_tq.adapters.replay import BatchPointer, RankLayout, RoutingSource, Switch
from arrow_tq.adapters.replay.layout import PAD
from arrow_tq.adapters.replay.rows import check, replayable
from arrow_tq_schemas.errors import Conflict, InvalidField, InvalidInput, ValueOutOfRange
from arrow_tq_schemas.fields import Field
from tests.frameworks import LAYER_IDS, Scene, embedded

ROWS = (3, 0, 4)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = embedded(tmp_path)
    with made.store:
        yield made


def test_each_layer_gets_its_rows_in_int32(scene: Scene) -> None:
    source = RoutingSource(scene.batch, device="cpu")
    micro = source.micro_batch(ROWS, RankLayout(row_multiple=16), layers=(9, 2))
    lengths = [len(scene.truth[row].tokens) for row in ROWS]
    index = micro.layout.index(lengths)
    for layer in (9, 2):
        routing = micro.layer(layer)
        found = routing.materialize_for_routing_replay("forward")
        assert found.dtype == torch.int32
        assert tuple(found.shape) == routing.shape == (micro.local_rows, 2)
        wanted = np.concatenate(
            [
                np.vstack([scene.truth[row].experts[:, LAYER_IDS.index(layer)], np.zeros((1, 2), np.uint8)])
                for row in ROWS
            ]
        )
        np.testing.assert_array_equal(found.numpy()[index != PAD], wanted[index[index != PAD]])
    assert source.fetches == 1
    assert micro.layer(9).to("cpu").dtype == torch.int64
    assert micro.layer(9).to(torch.device("cpu"), dtype=torch.int32, non_blocking=True).dtype == torch.int32
    assert sorted(micro.tensors()) == [2, 9]
    with pytest.raises(InvalidInput, match=r"layer 1: this micro-batch has layers \[9, 2\]"):
        micro.layer(1)


def test_three_passes_fetch_once(scene: Scene) -> None:
    source = RoutingSource(scene.batch, device="cpu")
    micros = [source.micro_batch(rows) for rows in ((0, 1), (2, 3), (4,))]
    for stages in (("forward",), ("forward", "backward")):
        source.begin_pass(stages[-1])
        for micro in micros:
            for stage in stages:
                for layer in LAYER_IDS:
                    micro.layer(layer).materialize_for_routing_replay(stage)
    assert source.fetches == 3
    assert source.kept_bytes == sum(micro.experts().nbytes for micro in micros)


def test_what_does_not_fit_is_fetched_again(scene: Scene) -> None:
    probe = RoutingSource(scene.batch, device="cpu")
    sizes = [probe.micro_batch((row,)).experts().nbytes for row in range(5)]
    source = RoutingSource(scene.batch, capacity_bytes=max(sizes), device="cpu")
    micros = [source.micro_batch((row,)) for row in range(5)]
    for _ in range(2):
        for row, micro in enumerate(micros):
            for layer in LAYER_IDS:
                found = micro.layer(layer).materialize_for_routing_replay("forward").numpy()
                truth = scene.truth[row].experts[:, LAYER_IDS.index(layer)]
                np.testing.assert_array_equal(found[:-1], truth)
                assert source.kept_bytes <= source.capacity_bytes
    # Each layer of a micro-batch came of one fetch, each micro-batch of one fetch a pass.
    assert 5 < source.fetches <= 10
    tiny = RoutingSource(scene.batch, capacity_bytes=max(sizes) - 1, device="cpu")
    with pytest.raises(InvalidInput, match=f"capacity_bytes is {max(sizes) - 1}"):
        tiny.micro_batch((int(np.argmax(sizes)),)).experts()


def test_what_a_pass_is_done_with_goes_first(scene: Scene) -> None:
    probe = RoutingSource(scene.batch, device="cpu")
    sizes = [probe.micro_batch((row,)).experts().nbytes for row in range(3)]
    source = RoutingSource(scene.batch, capacity_bytes=sum(sizes[:2]) + sizes[2] - 1, device="cpu")
    first, second, third = (source.micro_batch((row,)) for row in range(3))
    source.begin_pass("backward")
    first.experts()
    for layer in LAYER_IDS:
        second.layer(layer).materialize_for_routing_replay("forward")
        second.layer(layer).materialize_for_routing_replay("backward")
    third.experts()
    fetches = source.fetches
    first.experts()
    assert source.fetches == fetches
    second.experts()
    assert source.fetches == fetches + 1
    source.release(first)
    assert source.kept_bytes < sum(sizes)


def test_threads_share_one_fetch(scene: Scene) -> None:
    source = RoutingSource(scene.batch, device="cpu")
    micro = source.micro_batch(range(5))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda layer: micro.layer(layer).to("cpu"), LAYER_IDS * 4))
    assert source.fetches == 1
    assert len(found) == 24


def test_a_pickle_holds_no_payload(scene: Scene) -> None:
    source = RoutingSource(scene.batch, device="cpu")
    micro = source.micro_batch(ROWS, RankLayout(cp_rank=1, cp_size=2))
    micro.experts()
    layers = list(micro.by_layer().values())
    pickled = pickle.dumps(layers)
    assert len(pickled) < 2048
    copies = pickle.loads(pickled)
    assert [copy.layer_id for copy in copies] == list(LAYER_IDS)
    assert copies[0].micro.rows == ROWS
    assert copies[0].micro.layout == micro.layout
    assert copies[0].micro.source is copies[1].micro.source
    assert copies[0].micro.source.pointer == BatchPointer.of(scene.batch)
    with pytest.raises(InvalidInput, match="say as which rank to attach"):
        copies[0].to("cpu")


def test_an_embedded_store_is_for_its_own_process(scene: Scene) -> None:
    with pytest.raises(InvalidInput, match="expected grpc://"):
        BatchPointer.of(scene.batch).at(0, 1).open()


def test_a_closed_source_says_so(scene: Scene) -> None:
    source = RoutingSource(scene.batch, device="cpu")
    micro = source.micro_batch((0,))
    micro.experts()
    source.close()
    source.close()
    assert source.kept_bytes == 0
    with pytest.raises(Conflict, match="closed"):
        micro.experts()
    scene.batch.fetch("token_ids")


def test_wide_ids_never_reach_torch_as_uint16(tmp_path: Path) -> None:
    """320 experts are stored as uint16, of which torch can hardly do anything."""
    with arrow_tq.open(tmp_path) as store:
        field = fields.routed_experts(topk=2, num_experts=320, layer_ids=[4])
        run = store.run("wide", fields=[fields.token_ids(), field])
        assert field.dtype == "uint16"
        session = run.session("s")
        experts = np.array([[[319, 256]], [[0, 255]], [[7, 300]]], np.int32)
        with session.step(id="c", sampled=(1, 4)) as step:
            step.put("token_ids", np.arange(4, dtype=np.int32), start=0)
            step.put("routed_experts", experts, start=0)
        session.finalize()
        source = RoutingSource(run.claim(1), device="cpu")
        micro = source.micro_batch((0,))
        found = micro.layer(4).materialize_for_routing_replay("forward")
        assert found.dtype == torch.int32
        assert found[:3].tolist() == experts[:, 0].tolist()
        assert micro.tensors("int64")[4].dtype == torch.int64


@pytest.mark.parametrize(("value", "hint"), [(-1, r" \(-1 marks a row that was not recorded\)"), (64, "")])
def test_bad_ids_are_named(value: int, hint: str) -> None:
    experts = np.zeros((4, 2, 3), np.int16)
    experts[2, 1, 0] = value
    with pytest.raises(
        ValueOutOfRange, match=f"here: layer 9, row 2: expert {value}, expected 0 to 63{hint}$"
    ):
        check(experts, 64, (5, 9), "here")
    check(experts[:2], 64, (5, 9), "here")
    check(np.full((1, 1, 1), 255, np.uint8), 256, (0,), "here")


def test_only_routing_is_replayed() -> None:
    with pytest.raises(InvalidField, match=r"expected \[layers, top-k\]"):
        replayable(fields.logprobs())
    with pytest.raises(InvalidField, match="top 8 of 4 experts"):
        replayable(Field("routed", "uint8", (1, 8), layer_axis=0, num_experts=4))


def test_the_switch() -> None:
    assert Switch.parse("logprobs+routing") is Switch.ROUTING
    assert [(one.has_logprobs, one.has_routing) for one in Switch] == [
        (False,) * 2,
        (True, False),
        (True,) * 2,
    ]
    with pytest.raises(InvalidInput, match="'on': expected one of 'off', 'logprobs', 'logprobs\\+routing'"):
        Switch.parse("on")
