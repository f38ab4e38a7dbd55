"""The catalog's map of shards: numbers, epochs, and when another process may be a shard."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from arrow_tq import errors
from arrow_tq.client.options import ClientOptions
from arrow_tq.store.cluster import shard_map as shard_map_module
from arrow_tq.store.cluster.shard_map import Member, ShardMap
from arrow_tq.store.cluster.shard_set import ShardSet
from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardConfig
from arrow_tq_schemas.cluster import (
    Beat,
    Confirmed,
    ConfirmedChunk,
    JoinCluster,
    Joined,
    LeaveCluster,
    ShardServer,
)
from arrow_tq_schemas.ids import ChunkId, IdFactory
from arrow_tq_schemas.receipts import Receipt, StoredChunk

LOCK, OTHER_LOCK = "1" * 32, "2" * 32


def server(name: str = "a") -> ShardServer:
    return ShardServer(url=f"grpc://{name}:1", host="h")


def shard_map(folder: Path, lease_s: float = 60.0, fence_s: float = 60.0) -> ShardMap:
    return ShardMap(folder, lease_s, fence_s, lambda: None)


def join(
    into: ShardMap,
    node: str,
    number: int | None = None,
    where: ShardServer | None = None,
    lock: str = LOCK,
) -> Joined:
    asked = JoinCluster(
        node=node, server=where or server(), capacity_bytes=100, used_bytes=0, number=number, lock=lock
    )
    return into.join(asked)


def beat(joined: Joined, used_bytes: int = 0, lock: str = LOCK) -> Beat:
    return Beat(
        number=joined.number, epoch=joined.epoch, lock=lock, used_bytes=used_bytes, capacity_bytes=100
    )


def test_numbers_go_with_directories_and_epochs_count_joins(tmp_path: Path) -> None:
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    known = shard_map(tmp_path)
    assert known.map().shards == []
    one = join(known, first)
    two = join(known, second)
    assert [(one.number, one.epoch), (two.number, two.epoch)] == [(1, 1), (2, 1)]
    before = known.map().version
    again = join(known, first, number=1, where=server("elsewhere"))
    assert (again.number, again.epoch) == (1, 2)
    assert known.map().version > before
    with pytest.raises(errors.StaleEpoch, match="epoch 1 is over, grpc://elsewhere:1"):
        known.beat(beat(one))
    known.beat(beat(again, used_bytes=40))
    entry = known.map().shard(1)
    assert entry is not None and (entry.used_bytes, entry.up) == (40, True)


def test_the_map_outlives_its_catalog(tmp_path: Path) -> None:
    node = uuid.uuid4().hex
    joined = join(shard_map(tmp_path), node)
    later = shard_map(tmp_path)
    assert later.map().version > 1
    later.beat(beat(joined))
    entry = later.map().shard(joined.number)
    assert entry is not None and entry.epoch == 1 and entry.servers == [server()]
    assert join(later, node, joined.number).epoch == 2


def test_a_lost_map_takes_shards_back_under_their_numbers(tmp_path: Path) -> None:
    known = shard_map(tmp_path)
    with pytest.raises(errors.NotFound, match="shard 7 never joined"):
        known.beat(Beat(number=7, epoch=3, lock=LOCK, used_bytes=0, capacity_bytes=1))
    assert join(known, uuid.uuid4().hex, number=7).number == 7
    assert join(known, uuid.uuid4().hex).number == 8
    for number in (7, 0):
        with pytest.raises(errors.Conflict, match=f"shard {number}: it belongs to another data directory"):
            join(known, uuid.uuid4().hex, number=number)


def test_a_shard_says_how_full_it_is_between_beats_too(tmp_path: Path) -> None:
    members = shard_map(tmp_path)
    joined = join(members, "a" * 32)
    members.beat(beat(joined, used_bytes=10))
    earlier = members.member(joined.number)
    assert earlier is not None
    members.fills(earlier, 30)
    assert members.map().shards[0].used_bytes == 30
    join(members, "a" * 32)
    members.fills(earlier, 90)
    assert members.map().shards[0].used_bytes == 0, "another process is the shard now"


def test_who_is_not_heard_of_is_down_until_it_is(tmp_path: Path) -> None:
    known = shard_map(tmp_path, lease_s=60.0)
    joined = join(known, uuid.uuid4().hex)
    assert known.is_up(1)
    version = known.map().version
    known.lost_touch(1)
    assert not known.is_up(1)
    assert known.map().version == version + 1
    known.beat(beat(joined))
    assert known.is_up(1)
    assert known.map().version == version + 2
    assert not known.is_up(9)


def test_a_number_is_given_again_when_its_process_cannot_answer_any_more(tmp_path: Path) -> None:
    node, known = uuid.uuid4().hex, shard_map(tmp_path, lease_s=0.001, fence_s=60.0)
    first = join(known, node)
    assert (first.lease_s, first.fence_s) == (0.001, 60.0)
    time.sleep(0.01)
    known.lost_touch(1)
    assert not known.is_up(1)
    # Down, and it may answer all the same: whoever has a copy of its directory waits.
    for waiting in (known, shard_map(tmp_path, fence_s=0.001)):
        with pytest.raises(errors.Unavailable, match="shard 1: grpc://a:1 may still answer as it") as caught:
            join(waiting, node, number=1, where=server("b"), lock=OTHER_LOCK)
        assert 0 < float(str(caught.value.details["left_s"])) <= 60
        assert caught.value.retryable
        waiting.beat(beat(first))
    # Who has locked the very same directory has seen it end.
    assert join(known, node, number=1, where=server("b")).epoch == 2


def test_a_process_that_left_leaves_its_number(tmp_path: Path) -> None:
    node, known = uuid.uuid4().hex, shard_map(tmp_path)
    joined = join(known, node)
    known.leave(LeaveCluster(number=1, epoch=joined.epoch, lock=LOCK))
    assert not known.is_up(1)
    assert join(known, node, number=1, lock=OTHER_LOCK).epoch == 2
    with pytest.raises(errors.StaleEpoch):
        known.leave(LeaveCluster(number=1, epoch=joined.epoch, lock=LOCK))
    assert known.is_up(1)


def test_a_number_is_free_once_its_process_was_not_answered_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(shard_map_module, "time", clock)
    node, known = uuid.uuid4().hex, shard_map(tmp_path, lease_s=20.0, fence_s=10.0)
    joined = join(known, node)
    assert joined.fence_s == 20.0, "it asks before it ends"
    clock.now += 19
    known.beat(beat(joined))
    clock.now += 19
    with pytest.raises(errors.Unavailable, match=r"for 1\.0 s"):
        join(known, node, number=1, lock=OTHER_LOCK)
    clock.now += 1
    assert join(known, node, number=1, lock=OTHER_LOCK).epoch == 2
    with pytest.raises(errors.StaleEpoch, match="epoch 1 is over"):
        known.beat(beat(joined))


def test_a_map_that_began_anew_knows_processes_apart(tmp_path: Path) -> None:
    """Its epochs count from 1 again: a process of the map before may be in the same one."""
    node = uuid.uuid4().hex
    before = join(shard_map(tmp_path), node)
    (tmp_path / "cluster.json").unlink()
    known = shard_map(tmp_path)
    now = join(known, node, number=1, lock=OTHER_LOCK)
    assert now.epoch == before.epoch
    with pytest.raises(errors.StaleEpoch):
        known.beat(beat(before))
    known.beat(beat(now, lock=OTHER_LOCK))


def test_a_map_of_an_older_version_keeps_its_promises(tmp_path: Path) -> None:
    node = uuid.uuid4().hex
    join(shard_map(tmp_path), node)
    path = tmp_path / "cluster.json"
    kept = json.loads(path.read_text())
    for one in kept["shards"]:
        del one["lock"], one["fence_s"]
    path.write_text(json.dumps(kept))
    with pytest.raises(errors.Unavailable, match="may still answer"):
        join(shard_map(tmp_path), node, number=1)
    known = shard_map(tmp_path, lease_s=0.001, fence_s=0.001)
    time.sleep(0.01)
    assert join(known, node, number=1).epoch == 2


def test_a_confirmation_of_a_shard_that_was_replaced_meanwhile_is_none(tmp_path: Path) -> None:
    known = shard_map(tmp_path)
    node, chunk_id = uuid.uuid4().hex, IdFactory().next(1)
    join(known, node)
    shard = Shard(ShardConfig(tmp_path / "data", tmp_path / "memory", 1 << 24))
    chunks = ShardSet(shard, False, known, None, None, ClientOptions())
    member = known.member(1)
    assert member is not None
    chunks.link = lambda number: SlowAnswer(member, lambda: join(known, node))  # type: ignore[assignment, return-value]
    stored = StoredChunk(id=chunk_id.hex, start=0, rows=1, bytes=4)
    receipt = Receipt(run="r", epoch=0, field="x", start=0, rows=1, chunks=[stored])
    try:
        with (
            chunks.confirming([("r", receipt)]),
            pytest.raises(errors.Unavailable, match=r"shard 1 .*replaced"),
        ):
            chunks.header(chunk_id)
    finally:
        chunks.close()
        shard.close()


class SlowAnswer:
    """A link whose shard confirms, and is replaced while the answer is on its way."""

    def __init__(self, member: Member, meanwhile: Callable[[], object]) -> None:
        self.member = member
        self._meanwhile = meanwhile

    def confirm(self, run: str, ids: Sequence[ChunkId]) -> Confirmed:
        self._meanwhile()
        one = ConfirmedChunk(run=run, epoch=0, field="x", start=0, rows=1, checksum="0" * 32)
        return Confirmed(chunks=[one for _ in ids])
