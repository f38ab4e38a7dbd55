"""A store on Ray nodes that each have a disk of their own: a shard is where its directory is, or away."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from arrow_tq import errors, fields
from arrow_tq.client.backend import FlightBackend
from arrow_tq.interface import Store
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas import cluster as k
from tests.cluster.rays import actors, alive, cluster_map, node_with_disk, ray_nodes, up
from tests.cluster.test_cluster_faults import check_session, spread_session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NAME = "disks"
SETTINGS = {"lease_s": 2.0, "drain_s": 3.0}
AWAY_S, BACK_S = 30.0, 90.0


@dataclass(frozen=True)
class Scene:
    cluster: Any
    disks: Path

    def start(self, **more: Any) -> None:
        from arrow_tq.adapters import ray as on_ray

        arguments = {"memory_root": "$DISK/memory", "settings": SETTINGS, "cpus_per_shard": 0.5, **more}
        on_ray.start("$DISK/data", doors=on_ray.OPEN, name=NAME, **arguments)

    def folders(self) -> dict[int, Path]:
        """Directory of each number, on whatever disk."""
        from arrow_tq.store.cluster.shard_note import ShardNote

        found = {}
        for folder in self.disks.glob(f"*/data/{NAME}/shard-*"):
            note = ShardNote.read(folder)
            assert note is not None and note.number is not None
            found[note.number] = folder
        return found

    def swap(self, one: str, other: str) -> None:
        """What is on two nodes' disks changes places."""
        for a, b in ((one, "x"), (other, one), ("x", other)):
            (self.disks / a).rename(self.disks / b)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    disks = tmp_path_factory.mktemp("disks")
    with ray_nodes(3, disks) as cluster:
        yield Scene(cluster, disks)


@pytest.fixture
def store(scene: Scene) -> Iterator[None]:
    """The store has three shards and a session on each, and does not run."""
    from arrow_tq.adapters import ray as on_ray

    if not scene.folders():
        scene.start()
        with on_ray.connect(NAME) as store:
            run = store.run("r", fields=[fields.token_ids()])
            for number in up(store):
                spread_session(run, f"on-{number}", [number])
        on_ray.stop(NAME)
    yield
    on_ray.stop(NAME)


def addresses(store: Store) -> dict[int, str]:
    """Host of each shard that is up."""
    found = {one.number: one.servers[0].url for one in cluster_map(store).shards if one.up}
    return {number: url.split("//")[1].rpartition(":")[0] for number, url in found.items()}


def disk_of(folder: Path) -> str:
    return folder.parents[2].name


def test_a_number_comes_up_on_the_node_whose_disk_holds_it(scene: Scene, store: None) -> None:
    from arrow_tq.adapters import ray as on_ray

    assert sorted(map(disk_of, scene.folders().values())) == ["1", "2", "3"], "each node made its own"
    # Somebody puts each disk into the other machine; Ray cannot know.
    scene.swap("2", "3")
    scene.start()
    with on_ray.connect(NAME) as store_:
        where = addresses(store_)
        for number, folder in scene.folders().items():
            if disk_of(folder) != "1":
                assert where[number] == f"127.0.0.{disk_of(folder)}"
            check_session(store_.run("r"), f"on-{number}", [0])
    assert len(scene.folders()) == len(where) == 3, "nothing new was made"


def test_a_directory_that_is_nowhere_is_refused_or_left(scene: Scene, store: None) -> None:
    from arrow_tq.adapters import ray as on_ray

    number, folder = next((one, at) for one, at in scene.folders().items() if disk_of(at) == "2")
    aside = scene.disks / "aside"
    folder.rename(aside)
    with pytest.raises(errors.Unavailable, match=f"no node has the directory of shard {number}:"):
        scene.start()
    with pytest.raises(errors.NotFound):
        on_ray.connect(NAME)
    assert len(scene.folders()) == 2, "no empty directory took its place"
    scene.start(missing="leave", nodes=2)
    with on_ray.connect(NAME) as store_:
        wait_until(lambda: len(up(store_)) == 2, AWAY_S)
        with pytest.raises(errors.ChunkPending, match=f"shard {number} at "):
            store_.run("r").table([f"on-{number}"], fields=["token_ids"])
    on_ray.stop(NAME)
    aside.rename(folder)
    with pytest.raises(errors.Conflict, match="where no place is left"):
        scene.start(nodes=2)


def test_another_catalog_does_not_take_the_shards(scene: Scene, store: None) -> None:
    """An empty one would call all of their chunks orphans, and have them dropped."""
    here = scene.disks / "1" / "data" / NAME / "catalog"
    aside, there = scene.disks / "catalog", scene.disks / "3" / "data" / NAME / "catalog"
    here.rename(there)
    with pytest.raises(errors.Conflict, match=r"catalog is on 127\.0\.0\.3"):
        scene.start()
    assert not here.exists()
    there.rename(aside)
    with pytest.raises(errors.Conflict, match=r"the catalog does not know shard 1"):
        scene.start()
    shutil.rmtree(here)
    aside.rename(here)


def test_a_node_that_starts_again_has_its_shard_again(scene: Scene, store: None) -> None:
    """On its disk and nowhere else: not on another node, and not on its own with an empty disk."""
    import ray

    from arrow_tq.adapters import ray as on_ray

    scene.start()
    with on_ray.connect(NAME) as store_:
        run = store_.run("r")
        number = next(one for one, at in addresses(store_).items() if at == "127.0.0.2")
        before = entry_of(store_, number)
        actor = next(
            one for one in actors(NAME, 3).values() if ray.get(one.url.remote()) == before.servers[0].url
        )
        pid = ray.get(actor.pid.remote())
        remove(scene, "127.0.0.2")
        wait_until(lambda: number not in up(store_), AWAY_S)
        # A node with room, but without the directory, is no place for it.
        scene.cluster.add_node(**node_with_disk(scene.disks, 4))
        # The machine is back, with an empty disk: refused, and nothing is made there.
        (scene.disks / "2").rename(scene.disks / "unplugged")
        (scene.disks / "2").mkdir()
        scene.cluster.add_node(**node_with_disk(scene.disks, 2))
        with pytest.raises(AssertionError):
            wait_until(lambda: number in up(store_), 20)
        assert not list((scene.disks / "2").rglob("shard-*"))
        assert not alive(pid)
        (scene.disks / "2").rmdir()
        (scene.disks / "unplugged").rename(scene.disks / "2")
        wait_until(lambda: number in up(store_), BACK_S)
        after = entry_of(store_, number)
        assert after.epoch > before.epoch and addresses(store_)[number] == "127.0.0.2"
        check_session(run, f"on-{number}", [0])
        asked = k.FetchChunks(number=number, epoch=before.epoch, ids=[])
        with closing(FlightBackend(after.servers[0].url)) as backend, pytest.raises(errors.StaleEpoch):
            backend.execute(asked)
        remove(scene, "127.0.0.4")


def entry_of(store: Store, number: int) -> k.ShardEntry:
    found = cluster_map(store).shard(number)
    assert found is not None
    return found


def remove(scene: Scene, address: str) -> None:
    node = next(one for one in scene.cluster.worker_nodes if one.node_ip_address == address)
    scene.cluster.remove_node(node, allow_graceful=False)
