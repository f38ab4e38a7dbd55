"""A store on a Ray cluster: a catalog, and shards on every node, as actors that Ray restarts.

``start`` once, ``connect`` from any worker, ``read_segments`` as a Ray dataset, ``stop`` at the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import arrow_tq
from arrow_tq.adapters.ray_actor import ServerActor, ServerPlan
from arrow_tq.adapters.ray_segments import SegmentsSource, SegmentsWanted
from arrow_tq.calls import ask
from arrow_tq.client.backend import FlightBackend
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.tls import Tls
from arrow_tq_schemas.cluster import ClusterMap, GetCluster
from arrow_tq_schemas.commands import View
from arrow_tq_schemas.errors import ArrowTQError, Conflict, InvalidInput, NotFound, Unavailable
from arrow_tq_schemas.names import check_id

if TYPE_CHECKING:
    from arrow_tq.interface import Store

__all__ = ["connect", "read_segments", "start", "stop"]

NAMESPACE = "arrow-tq"
"""Of the actors: whoever looks for them has a namespace of its own."""
NAME = "store"
ASK_S = 30.0
STOP_S = 60.0
POLL_S = 0.1


def start(
    data_root: str | Path,
    *,
    name: str = NAME,
    shards_per_node: int = 1,
    nodes: int | None = None,
    cpus_per_shard: float = 1.0,
    memory_root: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    ready_s: float = 120.0,
) -> str:
    """Start a store on the Ray cluster that this process is connected to; it outlives this process.

    The catalog is on this process's node, and never on another: its directory is the store's metadata. Shards
    are spread over as many nodes. A server that dies is started again with its directory; a shard whose node
    is gone waits for another node to take its place.

    Args:
        data_root: directory on every node; the servers' directories are made in it.
        name: of this store in the Ray cluster.
        shards_per_node: shards on each node.
        nodes: nodes that get shards; None: all that are alive.
        cpus_per_shard: what Ray reserves for each of them.
        memory_root: directory in memory on every node; None: the servers' own choice.
        settings: further settings of the servers (``docs/configuration.md``), by name.
        token: with tokens: one with ``admin`` over every run, which the servers show to each other.
        tls: with TLS: what this process shows and checks.
        ready_s: how long all of it may take to be up.

    Returns:
        The store's URL, for processes outside of Ray.

    Raises:
        Conflict: a store of that name runs already.
        Unavailable: not all of it came up in time; nothing is left running.
    """
    _check(name, shards_per_node)
    count = sum(bool(node["Alive"]) for node in ray.nodes()) if nodes is None else nodes
    until = time.monotonic() + ready_s
    texts = {one: str(value) for one, value in (settings or {}).items()}
    root, memory = (
        Path(data_root).absolute() / name,
        None if memory_root is None else Path(memory_root) / name,
    )

    def plan(role: str, label: str, join: str | None = None) -> ServerPlan:
        return ServerPlan(role, root / label, None if memory is None else memory / label, texts, join, token)

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        catalog = _actor(f"{name}.catalog", plan("catalog", "catalog"), here, 0.0)
    except ValueError:
        raise Conflict(f"a store {name!r} runs on this Ray cluster already", name=name) from None
    try:
        url = _answer(catalog, until, f"the catalog of store {name!r}")
        bundles = [{"CPU": cpus_per_shard * shards_per_node} for _ in range(count)]
        group = placement_group(bundles, "STRICT_SPREAD", name=f"{name}.shards", lifetime="detached")
        if not group.wait(max(until - time.monotonic(), 0.0)):
            raise Unavailable(
                f"store {name!r}: Ray finds no {count} nodes with {bundles[0]['CPU']:g} free CPUs each"
            )
        for index in range(count * shards_per_node):
            place = PlacementGroupSchedulingStrategy(group, index // shards_per_node)
            label = f"shard-{index}"
            _actor(f"{name}.{label}", plan("shard", label, url), place, cpus_per_shard)
        _wait_up(url, count * shards_per_node, token, tls, until)
    except BaseException:
        stop(name=name, timeout_s=0.0)
        raise
    return url


def connect(
    name: str = NAME, token: str | None = None, options: ClientOptions | None = None, tls: Tls | None = None
) -> Store:
    """Connect to a store that ``start`` started, from any driver or worker of the Ray cluster.

    Raises:
        NotFound: no store of that name.
        Unavailable: its catalog does not answer.
    """
    return arrow_tq.connect(_url(name), token, options, tls)


def read_segments(
    run: str,
    field: str,
    *,
    segment_ids: Iterable[str] | None = None,
    where: str | None = None,
    view: View = "lineage",
    group: int = 0,
    layers: Iterable[int] | None = None,
    name: str = NAME,
    token: str | None = None,
    tls: Tls | None = None,
) -> ray.data.Dataset:
    """One field of finalized segments as a Ray dataset, each part read from the shard that holds it.

    Rows have ``segment_id``, ``position`` and the field's value, and come in no particular order.

    Args:
        run: the run.
        field: the field.
        segment_ids: which segments; None: those of ``where``.
        where: condition on segments, as in ``run.claim``; None: all of them.
        view: of what ``where`` is asked.
        group: layer group, where the field has several.
        layers: indices on the layer axis; None: all.
        name: the store.
        token: of one who may read the run.
        tls: with TLS: what readers show and check.

    Raises:
        NotFound: no such store, run, field or segment.
        ChunkPending: as the dataset is read: a shard is away; names it and the chunks.
    """
    wanted = SegmentsWanted(
        url=_url(name),
        run=run,
        field=field,
        segment_ids=None if segment_ids is None else tuple(segment_ids),
        where=where,
        view=view,
        group=group,
        layers=None if layers is None else tuple(layers),
        token=token,
        tls=tls,
    )
    source = SegmentsSource(wanted)
    # Else small answers would be split into many blocks.
    return ray.data.read_datasource(source, override_num_blocks=source.parts)


def stop(name: str = NAME, timeout_s: float = STOP_S) -> None:
    """Stop a store, shards first; what they work on is finished. Directories stay. Idempotent."""
    until = time.monotonic() + timeout_s
    actors = {one: _find(one) for one in _members(name)}
    shards = [actor for one, actor in actors.items() if actor is not None and not one.endswith(".catalog")]
    catalogs = [actor for one, actor in actors.items() if actor is not None and one.endswith(".catalog")]
    for some in (shards, catalogs):
        asked = [actor.stop.remote() for actor in some]
        # Those of a node that is gone do not answer.
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=max(until - time.monotonic(), 0.0))
        for actor in some:
            ray.kill(actor, no_restart=True)
    for group_id in _groups(name):
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


def _check(name: str, shards_per_node: int) -> None:
    check_id(name, "store name")
    if shards_per_node < 1:
        raise InvalidInput(f"shards_per_node is {shards_per_node}: expected 1 or more")


def _actor(name: str, plan: ServerPlan, place: object, cpus: float) -> ActorHandle:
    remote = ray.remote(ServerActor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=cpus,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=place,
    )
    handle: ActorHandle = remote.remote(plan)
    return handle


def _find(name: str) -> ActorHandle | None:
    try:
        found: ActorHandle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    return found


def _url(name: str) -> str:
    catalog = _find(f"{name}.catalog")
    if catalog is None:
        raise NotFound(f"there is no store {name!r} on this Ray cluster", name=name)
    return _answer(catalog, time.monotonic() + ASK_S, f"the catalog of store {name!r}")


def _answer(actor: ActorHandle, until: float, what: str) -> str:
    try:
        url: str = ray.get(actor.url.remote(), timeout=max(until - time.monotonic(), 0.0))
    except GetTimeoutError:
        raise Unavailable(f"{what} does not answer: try again") from None
    except RayError as error:
        raise Unavailable(f"{what} is not up: {str(error).strip().splitlines()[-1]}") from None
    return url


def _wait_up(url: str, count: int, token: str | None, tls: Tls | None, until: float) -> None:
    backend = FlightBackend(url, token, tls=tls)
    try:
        while True:
            with contextlib.suppress(Unavailable):
                up = sum(one.up for one in ask(backend, GetCluster(), ClusterMap).shards)
                if up >= count:
                    return
            if time.monotonic() >= until:
                raise Unavailable(f"{count} shards did not join {url} in time: their actors' logs say why")
            time.sleep(POLL_S)
    finally:
        with contextlib.suppress(ArrowTQError):
            backend.close()


def _members(name: str) -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    own = [str(one["name"]) for one in found if one["namespace"] == NAMESPACE]
    return [one for one in own if one == f"{name}.catalog" or one.startswith(f"{name}.shard-")]


def _groups(name: str) -> list[str]:
    return [
        group_id
        for group_id, entry in ray.util.placement_group_table().items()
        if entry["name"] == f"{name}.shards" and entry["state"] != "REMOVED"
    ]
