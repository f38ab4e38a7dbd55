"""Which node of a Ray cluster serves which directory: decided from what was seen, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest

from arrow_tq.store.cluster.shard_note import ShardNote
from arrow_tq_schemas.errors import Conflict, InvalidInput, Unavailable

pytest.importorskip("ray", reason="needs the extra ray")

from arrow_tq.adapters.ray import start
from arrow_tq.adapters.ray_doors import OPEN, Doors
from arrow_tq.adapters.ray_placing import Found, Node, Seat, ShardFolder, check_known, on_node, seat

A, B, C = (Node(name, f"10.0.0.{index}", 4.0) for index, name in enumerate("abc", start=1))
NODES = [A, B, C]


def folder(number: int | None, *nodes: Node) -> ShardFolder:
    return ShardFolder(f"shard-{number}", f"name-{number}", number, frozenset(one.id for one in nodes))


def seated(seats: Sequence[Seat]) -> dict[str, list[int | None]]:
    return {one.node.id: sorted((s.number for s in one.shards), key=str) for one in seats}


def test_every_directory_is_served_where_it_is() -> None:
    for nodes in permutations(NODES):
        shards = [folder(number, node) for number, node in enumerate(nodes, start=1)]
        for order in permutations(shards):
            assert seated(seat(order, NODES, NODES, 3, 1)) == {
                node.id: [number] for number, node in enumerate(nodes, start=1)
            }


def test_shared_directories_fill_what_local_ones_leave() -> None:
    shards = [folder(1, *NODES), folder(2, *NODES), folder(3, B)]
    assert seated(seat(shards, NODES, NODES, 3, 1))["b"] == [3]
    assert sum(len(one.shards) for one in seat(shards, NODES, NODES, 3, 1)) == 3
    # Spread, not heaped.
    assert [
        len(one.shards) for one in seat([folder(n, *NODES) for n in range(1, 7)], NODES, NODES, 3, 4)
    ] == [
        2,
        2,
        2,
    ]


def test_nodes_with_directories_of_their_own_come_first() -> None:
    assert seated(seat([folder(1, C)], NODES, NODES, 1, 1)) == {"c": [1]}
    assert seated(seat([folder(1, C), folder(2, B)], NODES, NODES, 2, 1)) == {"b": [2], "c": [1]}


def test_a_directory_without_a_place_is_refused() -> None:
    with pytest.raises(Conflict, match=r"shard 1: .* on 10\.0\.0\.1, where no place"):
        # That node has no CPUs for it.
        seat([folder(1, A)], NODES, [B, C], 2, 1)
    with pytest.raises(Conflict, match=r"shard 2: its directory 'shard-2' is on 10\.0\.0\.1, where no place"):
        seat([folder(1, A), folder(2, A)], NODES, NODES, 3, 1)
    with pytest.raises(Conflict, match="a shard that never joined"):
        seat([folder(1, A), folder(2, B), folder(None, C)], NODES, NODES, 2, 1)


def test_directories_and_catalog_have_to_know_each_other() -> None:
    found = Found((folder(1, A), folder(2, B), folder(None, C)), frozenset("a"))
    check_known(found, [1, 2], "refuse")
    with pytest.raises(Unavailable, match="no node has the directory of shard 3, 4:") as caught:
        check_known(found, [1, 2, 3, 4], "refuse")
    assert caught.value.details["numbers"] == [3, 4]
    check_known(found, [1, 2, 3, 4], "leave")
    for missing in ("refuse", "leave"):
        with pytest.raises(Conflict, match="the catalog does not know shard 2"):
            check_known(found, [1], missing)  # type: ignore[arg-type]


def test_a_path_is_the_nodes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATQ_DISK", "/mnt/disk")
    assert on_node("$ATQ_DISK/store") == Path("/mnt/disk/store")
    monkeypatch.delenv("ATQ_DISK")
    for path in ("$ATQ_DISK/store", "store"):
        with pytest.raises(InvalidInput, match="no absolute path"):
            on_node(path)


def test_what_a_directory_says_of_itself_stays(tmp_path: Path) -> None:
    assert ShardNote.read(tmp_path) is None
    made = ShardNote.read_or_make(tmp_path)
    assert made.number is None and ShardNote.read_or_make(tmp_path) == made
    ShardNote(made.node, 7).write(tmp_path)
    assert ShardNote.read(tmp_path) == ShardNote(made.node, 7)


def test_doors_are_the_servers_settings() -> None:
    assert OPEN.settings() == {"insecure": "true"} and OPEN.tls() is None
    doors = Doors("/t", "/c", "/k", "/client", "/ca")
    assert doors.settings() == {
        "tokens_file": "/t",
        "tls_cert": "/c",
        "tls_key": "/k",
        "tls_client_ca": "/client",
        "cluster_ca": "/ca",
    }
    tls = doors.tls()
    assert tls is not None and (tls.ca, tls.cert, tls.key) == ("/ca", "/c", "/k")
    # TLS without tokens is still open to everybody: said to the server, or it would not start.
    assert Doors(tls_cert="/c", tls_key="/k").settings()["insecure"] == "true"
    with pytest.raises(InvalidInput, match="token is one of its tokens"):
        doors.check(None, ())
    with pytest.raises(InvalidInput, match="setting tokens_file"):
        OPEN.check(None, ["lease_s", "tokens_file"])


@pytest.mark.parametrize("name", ["../elsewhere", "first.shard-1", ""])
def test_a_store_is_not_named_like_a_path_or_a_part_of_another(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^store "):
        start(tmp_path, doors=OPEN, name=name)
