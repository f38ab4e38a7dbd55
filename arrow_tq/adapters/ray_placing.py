"""Where a store's directories are on a Ray cluster, and which node serves which of them.

A shard is its directory: it starts where that is, and nowhere else. Whoever starts a store looks on every
node, gives each directory to a node that has it, and makes new ones for the places that are left.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from arrow_tq.store.cluster.shard_note import ShardNote
from arrow_tq.store.directory import NOTE_NAME
from arrow_tq_schemas.errors import ArrowTQError, Conflict, InvalidInput, Unavailable

CATALOG = "catalog"
SHARD = "shard-"
POLL_S = 0.5
LOOK_S = 60.0
Answer = TypeVar("Answer")
Missing = Literal["refuse", "leave"]
"""What to do where no node has a directory that the store had."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive: Ray's id for it, new whenever it starts, its address, and all its CPUs."""

    id: str
    address: str
    cpus: float


@dataclass(frozen=True, slots=True)
class ShardFolder:
    """A shard's directory: its name in the store's root, what its note says, and the nodes that see it."""

    label: str
    identity: str
    number: int | None
    seen_by: frozenset[str]


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a store: its shards' directories, and the nodes with a catalog's."""

    shards: tuple[ShardFolder, ...]
    catalogs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Seat:
    """A node and the directories that are served there."""

    node: Node
    shards: tuple[ShardFolder, ...]


def on_node(path: str) -> Path:
    """A path as this node has it: variables are those of its own environment.

    Raises:
        InvalidInput: a variable that is not set here, or a path that is not absolute.
    """
    found = os.path.expandvars(path)
    if "$" in found or not Path(found).is_absolute():
        raise InvalidInput(f"directory {path!r}: on {ray.util.get_node_ip_address()} it is no absolute path")
    return Path(found)


def wait_nodes(count: int | None, cpus: float, until: float) -> list[Node]:
    """All nodes that are alive; returns when so many of them (None: any) have the CPUs.

    Raises:
        Unavailable: there were not, in time.
    """
    while True:
        nodes = [
            Node(one["NodeID"], one["NodeManagerAddress"], one["Resources"].get("CPU", 0.0))
            for one in ray.nodes()
            if one["Alive"]
        ]
        room = sum(node.cpus >= cpus for node in nodes)
        if room >= (count or 1):
            return sorted(nodes, key=lambda one: one.address)
        if time.monotonic() >= until:
            raise Unavailable(f"Ray finds no {count or 1} nodes with {cpus:g} CPUs: there are {room}")
        time.sleep(POLL_S)


def survey(root: str, nodes: Sequence[Node]) -> Found:
    """Look at a store's root on each node."""
    seen: dict[tuple[str, str, int | None], set[str]] = {}
    catalogs = set()
    for node, (labels, has_catalog) in zip(nodes, _on_each(nodes, _look, root), strict=True):
        for label in labels:
            seen.setdefault(label, set()).add(node.id)
        if has_catalog:
            catalogs.add(node.id)
    shards = [ShardFolder(*key, frozenset(by)) for key, by in seen.items()]
    return Found(tuple(sorted(shards, key=lambda one: one.label)), frozenset(catalogs))


def seat(
    shards: Iterable[ShardFolder], alive: Sequence[Node], room: Sequence[Node], count: int, places: int
) -> list[Seat]:
    """Give each directory to a node that sees it: ``count`` of those with room, ``places`` on each.

    Raises:
        Conflict: a directory has no place, naming its shard and where it is.
    """
    ordered = sorted(shards, key=lambda one: len(one.seen_by))
    # Nodes with directories that others do not see come first.
    own = {node.id: sum(one.seen_by == {node.id} for one in ordered) for node in room}
    chosen = sorted(room, key=lambda node: -own[node.id])[:count]
    seated: dict[str, list[ShardFolder]] = {node.id: [] for node in chosen}
    for shard in ordered:
        free = [ids for ids in seated if ids in shard.seen_by and len(seated[ids]) < places]
        if not free:
            where = ", ".join(node.address for node in alive if node.id in shard.seen_by)
            raise Conflict(
                f"{_called(shard)}: its directory {shard.label!r} is on {where}, where no place is left: "
                f"the store is started on {count} nodes with {places} shards each",
                number=shard.number,
            )
        seated[min(free, key=lambda ids: len(seated[ids]))].append(shard)
    return [Seat(node, tuple(seated[node.id])) for node in chosen]


def make_missing(root: str, seats: Sequence[Seat], places: int) -> int:
    """Make directories of new shards where places are left; says how many."""
    short = [(one.node, places - len(one.shards)) for one in seats if len(one.shards) < places]
    for node, count in short:
        _on_each([node], _make, root, count)
    return sum(count for _, count in short)


def check_known(found: Found, known: Iterable[int], missing: Missing) -> None:
    """Compare the directories with the numbers that the catalog gave.

    Raises:
        Conflict: a directory has a number that this catalog never gave: it is not the catalog of this store.
        Unavailable: there is no directory of a number that it gave.
    """
    here, given = {one.number for one in found.shards if one.number is not None}, set(known)
    if strange := sorted(here - given):
        raise Conflict(
            f"the catalog does not know shard {strange[0]}, whose directory there is: it is another "
            "store's, or a new one; start where the store's catalog is",
            numbers=strange,
        )
    if (away := sorted(given - here)) and missing == "refuse":
        raise Unavailable(
            f"no node has the directory of shard {', '.join(map(str, away))}: bring its disk back, or start "
            "with missing='leave', and its chunks are pending until then",
            numbers=away,
        )


def _look(root: str) -> tuple[list[tuple[str, str, int | None]], bool]:
    """On a node: name, identity and number of each shard's directory; whether there is a catalog's."""
    folder, found = on_node(root), []
    for one in sorted(folder.glob(f"{SHARD}*")):
        note = ShardNote.read(one) if one.is_dir() else None
        if note is not None:
            found.append((one.name, note.node, note.number))
    return found, (folder / CATALOG / NOTE_NAME).exists()


def _make(root: str, count: int) -> None:
    """On a node: directories of so many new shards."""
    for _ in range(count):
        folder = on_node(root) / f"{SHARD}{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True)
        ShardNote.read_or_make(folder)


def _on_each(nodes: Sequence[Node], call: Callable[..., Answer], *arguments: object) -> list[Answer]:
    remote = ray.remote(call)
    asked = [
        remote.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(*arguments)
        for node in nodes
    ]
    try:
        answers: list[Answer] = ray.get(asked, timeout=LOOK_S)
    except GetTimeoutError:
        raise Unavailable(f"not all of {len(nodes)} nodes answer") from None
    except RayError as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, ArrowTQError):
            raise error.cause from None
        raise Unavailable(f"a node cannot look for directories: {reason(error)}") from None
    return answers


def reason(error: RayError) -> str:
    """The last line of what Ray says: the error itself."""
    return str(error).strip().splitlines()[-1]


def _called(shard: ShardFolder) -> str:
    return "a shard that never joined" if shard.number is None else f"shard {shard.number}"
