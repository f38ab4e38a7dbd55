"""A store on a Ray cluster of three nodes: found by name, read as a dataset, outliving its processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import wait_until
from tests.cluster.rays import NODE, actors, alive, cluster_map, ray_nodes, up
from tests.cluster.test_cluster_faults import Load, check_acked, check_session, spread_session, tokens_of

LAYERS, TOPK, TURN = 2, 2, 8
SETTINGS = {"lease_s": 2.0, "drain_s": 3.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_nodes(3) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_store_on_one_node(tmp_path: Path) -> None:
    with ray_nodes(1):
        whole_life(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_on_three_nodes(nodes: Any, tmp_path: Path) -> None:
    from arrow_tq.adapters import ray as on_ray

    whole_life(tmp_path, 3)
    with pytest.raises(errors.Unavailable, match="finds no 9 nodes"):
        on_ray.start(tmp_path / "data", doors=on_ray.OPEN, name="large", nodes=9, ready_s=2)
    with pytest.raises(errors.Unavailable, match="finds no 1 nodes with 9 CPUs"):
        on_ray.start(tmp_path / "data", doors=on_ray.OPEN, name="large", cpus_per_shard=9, ready_s=2)
    with pytest.raises(errors.NotFound):
        on_ray.connect("large")


def whole_life(tmp_path: Path, count: int) -> None:
    """Started on so many nodes, written and read by workers; on several its processes are killed; stopped."""
    import ray

    from arrow_tq.adapters import ray as on_ray

    with pytest.raises(errors.NotFound, match="no store 'first'"):
        on_ray.connect("first")
    folders: Any = {
        "data_root": tmp_path / "data",
        "memory_root": tmp_path / "memory",
        "doors": on_ray.OPEN,
    }
    url = on_ray.start(**folders, name="first", settings=SETTINGS, cpus_per_shard=0.5)
    with pytest.raises(errors.Conflict, match="runs on this Ray cluster already"):
        on_ray.start(**folders, name="first")
    places = ray.get([actor.node.remote() for actor in actors("first", count).values()])
    assert len(set(places)) == count, "one shard a node"

    @ray.remote(num_cpus=0)
    def produce(index: int) -> str:
        with on_ray.connect("first") as store:
            run = store.run("r", fields=[fields.token_ids(), fields.routed_experts(LAYERS, TOPK)])
            session = run.session(f"s{index}")
            session.pin_shard(index % count + 1)
            with session.step(id="0", sampled=(0, TURN)) as step:
                step.put("token_ids", tokens_of(f"s{index}", 0), start=0)
                step.put("routed_experts", np.full((TURN, LAYERS, TOPK), index, np.uint8), start=0)
            session.finalize()
            return session.id

    names = ray.get([produce.remote(index) for index in range(6)], timeout=120)
    assert sorted(names) == [f"s{index}" for index in range(6)]
    with on_ray.connect("first") as store:
        assert store.run("r").sql("SELECT DISTINCT shard FROM chunks").num_rows == count
        dataset = on_ray.read_segments("r", "token_ids", name="first")
        assert read_tasks(url, "r", "token_ids") == count, "each shard is read by a task of its own"
        rows = dataset.materialize()
        assert rows.num_blocks() == count
        found: dict[str, list[tuple[int, int]]] = {}
        for row in rows.take_all():
            found.setdefault(row["segment_id"], []).append((row["position"], row["token_ids"]))
        for index in range(6):
            got = [token for _, token in sorted(found[f"s{index}~0"])]
            np.testing.assert_array_equal(got, tokens_of(f"s{index}", 0))
        none = on_ray.read_segments("r", "token_ids", where="reward > 1e9", name="first")
        assert none.take_all() == []
        some = on_ray.read_segments("r", "routed_experts", segment_ids=["s4~0"], name="first", layers=[1])
        (batch,) = some.iter_batches(batch_size=None)
        np.testing.assert_array_equal(
            np.stack(list(batch["routed_experts"])), np.full((TURN - 1, 1, TOPK), 4, np.uint8)
        )
        if count == 3:
            restarts_with_its_directory(store, "first")
    pids = [ray.get(actor.pid.remote()) for actor in actors("first", count).values()]
    on_ray.stop("first")
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(errors.Unreachable):
        arrow_tq.connect(url, options=arrow_tq.client.ClientOptions(connect_s=1.0))
    with pytest.raises(errors.NotFound):
        on_ray.connect("first")


def read_tasks(url: str, run: str, field: str) -> int:
    """How many tasks Ray Data would run, and that each of them reads something."""
    from arrow_tq.adapters.ray_segments import SegmentsSource, SegmentsWanted

    wanted = SegmentsWanted(url, run, field, None, None, "lineage", 0, None, None, None)
    tasks = SegmentsSource(wanted).get_read_tasks(1)
    assert all(sum(block.num_rows for block in task()) for task in tasks)
    return len(tasks)


def restarts_with_its_directory(store: Store, name: str) -> None:
    """The server of one shard is killed, then the actor of the catalog."""
    import ray

    run = store.run("r")
    epochs = {one.number: one.epoch for one in cluster_map(store).shards}
    actor = actors(name, 3)[0]
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    wait_until(lambda: sum(one.epoch for one in cluster_map(store).shards) > sum(epochs.values()), 60)
    assert {one.number for one in cluster_map(store).shards} == set(epochs)
    wait_until(lambda: len(up(store)) == 3, 60)
    catalog = ray.get_actor(f"{name}.catalog", namespace="arrow-tq")
    before = ray.get(catalog.url.remote())
    pid = ray.get(catalog.pid.remote())
    ray.kill(catalog, no_restart=False)
    wait_until(lambda: not alive(pid), 30)
    # The same client goes on: the catalog is back where it was.
    for index in range(6):
        check_session(run, f"s{index}", [0])
    assert ray.get(catalog.url.remote()) == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_is_removed_under_load(nodes: Any, tmp_path: Path) -> None:
    from arrow_tq.adapters import ray as on_ray

    url = on_ray.start(
        tmp_path / "data",
        doors=on_ray.OPEN,
        name="second",
        memory_root=tmp_path / "memory",
        settings=SETTINGS,
        cpus_per_shard=0.5,
    )
    with on_ray.connect("second") as store:
        run = store.run("load", fields=[fields.token_ids()])
        numbers = up(store)
        assert len(numbers) == 3
        for number in numbers:
            spread_session(run, f"on-{number}", [number])
        load = Load(url)
        threads = load.start()
        try:
            load.goes_on()
            nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
            wait_until(lambda: len(up(store)) == 2, 60)
            living = up(store)
            (gone,) = set(numbers) - set(living)
            for number in living:
                check_session(run, f"on-{number}", [0])
            check_gone(run, gone)
            with pytest.raises(Exception, match=f"shard {gone} at "):
                on_ray.read_segments(
                    "load", "token_ids", segment_ids=[f"on-{gone}~0"], name="second"
                ).take_all()
            load.goes_on()
            # Another node takes its place; here it has the same disk.
            nodes.add_node(**NODE)
            wait_until(lambda: len(up(store)) == 3, 120)
            check_session(run, f"on-{gone}", [0])
            load.goes_on()
        finally:
            load.stop.set()
            for thread in threads:
                thread.join(120)
        assert not load.wrong
        check_acked(run, load)
    on_ray.stop("second")


def check_gone(run: Run, number: int) -> None:
    with pytest.raises(errors.ChunkPending, match=f"shard {number} at ") as caught:
        run.table([f"on-{number}"], fields=["token_ids"])
    rows = run.sql(f"SELECT chunk_id FROM chunks WHERE session_id = 'on-{number}'").to_pylist()
    assert caught.value.details["ids"] == [row["chunk_id"] for row in rows]
    assert caught.value.details["shard"] == number
