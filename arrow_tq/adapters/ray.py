"""A store on a Ray cluster: a catalog, and shards on every node, as actors that Ray restarts.

``start`` once, ``connect`` from any worker, ``read_segments`` as a Ray dataset, ``stop`` at the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import arrow_tq
from arrow_tq.adapters.ray_actor import ServerPlan
from arrow_tq.adapters.ray_doors import OPEN, Doors
from arrow_tq.adapters.ray_members import (
    answer,
    catalog_name,
    find_actor,
    members,
    remove_groups,
    reserve,
    shard_name,
    start_actor,
)
from arrow_tq.adapters.ray_placing import (
    CATALOG,
    Found,
    Missing,
    Node,
    Seat,
    check_known,
    make_missing,
    seat,
    survey,
    wait_nodes,
)
from arrow_tq.adapters.ray_segments import SegmentsSource, SegmentsWanted
from arrow_tq.calls import ask
from arrow_tq.client.backend import FlightBackend
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.tls import Tls
from arrow_tq_schemas.cluster import ClusterMap, GetCluster
from arrow_tq_schemas.commands import View
from arrow_tq_schemas.errors import Conflict, InvalidInput, NotFound, Unavailable
from arrow_tq_schemas.names import check_store

if TYPE_CHECKING:
    from arrow_tq.interface import Store

__all__ = ["OPEN", "Doors", "connect", "read_segments", "start", "stop"]

NAME = "store"
ASK_S = 30.0
STOP_S = 60.0
UNDO_S = 10.0
POLL_S = 0.1


def start(
    data_root: str | Path,
    *,
    doors: Doors,
    name: str = NAME,
    shards_per_node: int = 1,
    nodes: int | None = None,
    cpus_per_shard: float = 1.0,
    memory_root: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    missing: Missing = "refuse",
    ready_s: float = 120.0,
) -> str:
    """Start a store on the Ray cluster that this process is connected to; it outlives this process.

    The catalog is on this process's node, and never on another: its directory is the store's metadata. Shards
    are spread over as many nodes. A shard is started where its directory is: on its node, or on any where
    all of them see it. New ones are made for the places that are left.

    Args:
        data_root: directory on every node; the servers' directories are made in it. ``$NAME`` is a variable
            of the node.
        doors: who may come in: ``Doors(...)``, or ``OPEN`` for everybody who can connect.
        name: of this store in the Ray cluster: letters, digits, ``_`` and ``-``.
        shards_per_node: shards on each node.
        nodes: nodes that get shards; None: all that have CPUs for them.
        cpus_per_shard: what Ray reserves for each of them.
        memory_root: directory in memory on every node; None: the servers' own choice.
        settings: further settings of the servers (``docs/configuration.md``), by name.
        token: with tokens: one with ``admin`` over every run, which the servers show to each other.
        tls: with TLS: what this process shows and checks; None: what the servers do.
        missing: where no node has the directory of a shard that the store had: ``refuse``, or ``leave`` it
            away; its chunks are pending until it is started again.
        ready_s: how long all of it may take to be up.

    Returns:
        The store's URL, for processes outside of Ray.

    Raises:
        Conflict: a store of that name runs already; directories that do not go with each other, or with
            ``nodes`` and ``shards_per_node``.
        InvalidInput: settings that contradict each other.
        Unavailable: a shard's directory is nowhere, or not all came up in time; nothing is left running.
    """
    check_store(name)
    if shards_per_node < 1:
        raise InvalidInput(f"shards_per_node is {shards_per_node}: expected 1 or more")
    doors.check(token, settings or ())
    if find_actor(catalog_name(name)) is not None:
        raise _runs_already(name)
    until = time.monotonic() + ready_s
    root = f"{_rooted(data_root)}/{name}"
    plan = ServerPlan(
        CATALOG,
        f"{root}/{CATALOG}",
        None if memory_root is None else f"{_rooted(memory_root)}/{name}/{CATALOG}",
        {**{one: str(value) for one, value in (settings or {}).items()}, **doors.settings()},
        token=token,
    )
    node_cpus = cpus_per_shard * shards_per_node
    alive = wait_nodes(nodes, node_cpus, until)
    here = str(ray.get_runtime_context().get_node_id())
    found = survey(root, alive)
    _check_catalog(found, alive, here)
    try:
        catalog = start_actor(catalog_name(name), plan, NodeAffinitySchedulingStrategy(here, soft=False), 0.0)
    except ValueError:
        raise _runs_already(name) from None
    try:
        url = answer(catalog, until, f"the catalog of store {name!r}")
        with contextlib.closing(FlightBackend(url, token, tls=tls or doors.tls())) as backend:
            check_known(found, [one.number for one in ask(backend, GetCluster(), ClusterMap).shards], missing)
            room = [node for node in alive if node.cpus >= node_cpus]
            seats = _seats(root, found, alive, room, len(room) if nodes is None else nodes, shards_per_node)
            group = reserve(name, seats, node_cpus, len(alive), until)
            urls = _start_shards(name, plan, url, seats, group, cpus_per_shard, until)
            _wait_up(backend, urls, until)
    except BaseException:
        # Directories have to be free when this raises; an actor that never came up does not answer.
        stop(name=name, timeout_s=UNDO_S)
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
    for actors in members(name):
        asked = [actor.stop.remote() for actor in actors]
        # Those of a node that is gone do not answer.
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=max(until - time.monotonic(), 0.0))
        for actor in actors:
            ray.kill(actor, no_restart=True)
    remove_groups(name)


def _runs_already(name: str) -> Conflict:
    return Conflict(f"a store {name!r} runs on this Ray cluster already", name=name)


def _rooted(path: str | Path) -> str:
    """Absolute, unless it begins with a variable of the nodes."""
    return str(path) if str(path).startswith("$") else str(Path(path).absolute())


def _check_catalog(found: Found, alive: Sequence[Node], here: str) -> None:
    """Raises ``Conflict`` where the store's catalog is on another node: an empty one would replace it."""
    if found.catalogs and here not in found.catalogs:
        where = ", ".join(node.address for node in alive if node.id in found.catalogs)
        raise Conflict(f"this store's catalog is on {where}: start it from a process there")


def _seats(
    root: str, found: Found, alive: Sequence[Node], room: Sequence[Node], count: int, places: int
) -> list[Seat]:
    """Who of ``room`` serves which directory, those of new shards among them."""
    if make_missing(root, seat(found.shards, alive, room, count, places), places):
        # Only a look says which nodes see the new ones.
        found = survey(root, alive)
    return seat(found.shards, alive, room, count, places)


def _start_shards(
    name: str,
    plan: ServerPlan,
    url: str,
    seats: Sequence[Seat],
    group: PlacementGroup,
    cpus: float,
    until: float,
) -> set[str]:
    """Start an actor for each directory; gives their servers' URLs."""
    actors: list[ActorHandle] = []
    for bundle, one in enumerate(seats):
        place = PlacementGroupSchedulingStrategy(group, bundle)
        for folder in one.shards:
            mine = plan.of_shard(folder.label, folder.identity, url)
            actors.append(start_actor(shard_name(name, len(actors)), mine, place, cpus))
    return {answer(actor, until, f"a shard of store {name!r}") for actor in actors}


def _url(name: str) -> str:
    catalog = find_actor(catalog_name(name))
    if catalog is None:
        raise NotFound(f"there is no store {name!r} on this Ray cluster", name=name)
    return answer(catalog, time.monotonic() + ASK_S, f"the catalog of store {name!r}")


def _wait_up(backend: FlightBackend, urls: Collection[str], until: float) -> None:
    """Return when the catalog counts on the shards at these addresses, which are new ones."""
    away = set(urls)
    while True:
        with contextlib.suppress(Unavailable):
            shards = ask(backend, GetCluster(), ClusterMap).shards
            away = set(urls) - {one.servers[0].url for one in shards if one.up}
            if not away:
                return
        if time.monotonic() >= until:
            raise Unavailable(f"shards did not join {backend.url} in time: {', '.join(sorted(away))}")
        time.sleep(POLL_S)
