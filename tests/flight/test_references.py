"""References cross processes: a pickle of a few hundred bytes, payload only where a layer asks for it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch")

from arrow_tq.adapters import slime
from arrow_tq.adapters.replay import BatchPointer, RankLayout, RoutingSource, Switch
from arrow_tq.interface import Store
from arrow_tq_schemas.errors import ClaimGone
from tests.doubles.slime import Sample
from tests.frameworks import LAYER_IDS, Scene, claimed

REFERENCE_BYTES_MAX = 1024


@pytest.fixture
def scene(remote: Store, new_name: Callable[[], str]) -> Scene:
    return claimed(remote, 4, new_name())


def test_a_pointer_opens_the_batch_elsewhere(scene: Scene) -> None:
    pointer = pickle.loads(pickle.dumps(BatchPointer.of(scene.batch).at(0, 2)))
    assert len(pickle.dumps(pointer)) < REFERENCE_BYTES_MAX
    with pointer.open() as batch:
        assert batch.segment_ids == scene.batch.segment_ids
        found = batch.fetch("routed_experts")["routed_experts"]
        for one, truth in zip(found, scene.truth, strict=True):
            np.testing.assert_array_equal(one, truth.experts)
        batch.release()
    with pointer.at(1, 2).open() as batch:
        batch.release()
    with pytest.raises(ClaimGone):
        pointer.open()


def test_a_pickled_layer_fetches_over_a_connection_of_its_own(scene: Scene) -> None:
    source = RoutingSource(BatchPointer.of(scene.batch).at(0, 1), device="cpu")
    micro = source.micro_batch((1, 3), RankLayout(row_multiple=8))
    pickled = pickle.dumps([micro.layer(layer) for layer in LAYER_IDS])
    assert len(pickled) < 2 * REFERENCE_BYTES_MAX
    copies = pickle.loads(pickled)
    shared = copies[0].micro.source
    assert shared is not source
    index = RankLayout(row_multiple=8).index([len(scene.truth[row].tokens) for row in (1, 3)])
    for copy in copies:
        found = copy.materialize_for_routing_replay("forward").numpy()
        place = LAYER_IDS.index(copy.layer_id)
        padded = [np.vstack([scene.truth[row].experts[:, place], np.zeros((1, 2))]) for row in (1, 3)]
        np.testing.assert_array_equal(found[index >= 0], np.concatenate(padded)[index[index >= 0]])
    assert shared.fetches == 1
    shared.close()
    source.close()


# -- Ray -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[object]:
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    patch = pytest.MonkeyPatch()
    # No reports home, and no token file in the home directory: the cluster listens on the loopback alone.
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_AUTH_MODE", "disabled")
    root = str(Path(__file__).parents[2])
    environment = {"PYTHONPATH": os.pathsep.join([root, f"{root}/schemas", f"{root}/server"])}
    ray.init(
        "local",
        num_cpus=1,
        _node_ip_address="127.0.0.1",
        object_store_memory=80 << 20,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    yield ray
    ray.shutdown()
    patch.undo()


def test_references_resolve_on_ray_workers(scene: Scene, ray_cluster: object) -> None:
    """Two ranks get samples of a few hundred bytes; each reads its own; the object store stays empty."""
    import ray

    samples = [
        Sample(tokens=truth.tokens.tolist(), response_length=len(truth.tokens) - scene.prompt(row))
        for row, truth in enumerate(scene.truth)
    ]
    slime.fill_samples(samples, scene.batch, Switch.ROUTING)
    refs = [sample.rollout_routed_experts for sample in samples]
    assert all(len(ray.cloudpickle.dumps(ref)) < REFERENCE_BYTES_MAX for ref in refs)

    @ray.remote(num_cpus=1)
    def rank_sums(rank: int, refs: list[slime.RoutedExpertsRef]) -> dict[int, list[int]]:
        source = slime.source_of(refs, rank, 2)
        mine = refs[rank::2]
        sums = {}
        for ref in mine:
            micro = source.micro_batch((ref.row,))
            sums[ref.row] = [
                int(micro.layer(layer).materialize_for_routing_replay("forward")[:-1].sum())
                for layer in micro.layer_ids
            ]
        source.batch.release()
        source.close()
        return sums

    found: dict[int, list[int]] = {}
    for answer in ray.get([rank_sums.remote(rank, refs) for rank in range(2)], timeout=60):
        found |= answer
    wanted = {
        row: truth.experts.astype(int).sum(axis=(0, 2)).tolist() for row, truth in enumerate(scene.truth)
    }
    assert found == wanted
    store = "object_store_memory"
    assert ray.available_resources()[store] == ray.cluster_resources()[store]
    status = scene.batch.run.sql("SELECT DISTINCT status FROM segments")["status"].to_pylist()
    assert status == ["done"]
