"""The actors of a store on Ray: how they are started, found by name, asked and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from arrow_tq.adapters.ray_actor import ServerActor, ServerPlan
from arrow_tq.adapters.ray_placing import CATALOG, SHARD, Seat, reason
from arrow_tq_schemas.errors import Unavailable

NAMESPACE = "arrow-tq"
"""Of the actors: whoever looks for them has a namespace of its own."""
PIN = 0.001
"""Of a node's resource ``node:ADDRESS``, which Ray gives every node: enough to be placed there."""


def start_actor(name: str, plan: ServerPlan, place: object, cpus: float) -> ActorHandle:
    """Start a server under an actor that Ray restarts for as long as the store is there.

    Raises:
        ValueError: there is an actor of that name.
    """
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


def find_actor(name: str) -> ActorHandle | None:
    """None: there is no such actor."""
    try:
        found: ActorHandle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    return found


def catalog_name(name: str) -> str:
    """Name of the actor of a store's catalog."""
    return f"{name}.{CATALOG}"


def shard_name(name: str, index: int) -> str:
    """Name of the actor of a store's shard; the index counts actors and says nothing about its number."""
    return f"{name}.{SHARD}{index}"


def members(name: str) -> tuple[list[ActorHandle], list[ActorHandle]]:
    """The actors of a store: of its shards, and of its catalog."""
    named = ray.util.list_named_actors(all_namespaces=True)
    own = [str(one["name"]) for one in named if one["namespace"] == NAMESPACE]
    found = [
        [one for one in own if one.startswith(f"{name}.{SHARD}")],
        [one for one in own if one == catalog_name(name)],
    ]
    shards, catalogs = ([actor for one in some if (actor := find_actor(one)) is not None] for some in found)
    return shards, catalogs


def answer(actor: ActorHandle, until: float, what: str) -> str:
    """The URL of an actor's server.

    Raises:
        Unavailable: it is not up in time, or does not start at all.
    """
    try:
        url: str = ray.get(actor.url.remote(), timeout=max(until - time.monotonic(), 0.0))
    except GetTimeoutError:
        raise Unavailable(f"{what} does not answer: try again") from None
    except RayError as error:
        raise Unavailable(f"{what} is not up: {reason(error)}") from None
    return url


def reserve(name: str, seats: Sequence[Seat], cpus: float, alive: int, until: float) -> PlacementGroup:
    """A placement group of one bundle a seat, each on a node of its own.

    A seat is tied to its node's address, and moved to no other, unless all nodes see its directories.

    Raises:
        Unavailable: the nodes do not have so many CPUs free.
    """
    bundles = [{"CPU": cpus} for _ in seats]
    for bundle, one in zip(bundles, seats, strict=True):
        if alive == 1 or any(len(shard.seen_by) < alive for shard in one.shards):
            bundle[f"node:{one.node.address}"] = PIN
    group = placement_group(bundles, "STRICT_SPREAD", name=_group_name(name), lifetime="detached")
    if not group.wait(max(until - time.monotonic(), 0.0)):
        raise Unavailable(f"store {name!r}: Ray finds no {len(seats)} nodes with {cpus:g} free CPUs each")
    return group


def remove_groups(name: str) -> None:
    """Give back what was reserved for a store."""
    for group_id, entry in ray.util.placement_group_table().items():
        if entry["name"] == _group_name(name) and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


def _group_name(name: str) -> str:
    return f"{name}.shards"
