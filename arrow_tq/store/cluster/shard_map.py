"""The catalog's map of shards: who holds which number, in which epoch, and who is up.

Kept in a file beside the catalog's database: it changes only when a shard joins. Beats and fill are in
memory alone; after a restart a shard counts as up for one lease, in which it has time to beat, and as the
holder of its number for as long as it was ever told.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from arrow_tq.logs import logger
from arrow_tq_schemas.cluster import (
    Beat,
    ClusterMap,
    JoinCluster,
    Joined,
    LeaveCluster,
    ShardEntry,
    ShardServer,
)
from arrow_tq_schemas.errors import Conflict, NotFound, StaleEpoch, Unavailable
from arrow_tq_schemas.ids import SHARD_MAX

FILE_NAME = "cluster.json"
OWN_NUMBER = 0
"""Of the shard in the catalog's own process; others count from 1."""


@dataclass(frozen=True, slots=True)
class Member:
    """A shard that joined."""

    number: int
    epoch: int
    node: str
    lock: str
    """Of its data directory; the empty one of an older map is nobody's."""
    server: ShardServer
    capacity_bytes: int
    used_bytes: int
    seen_at: float
    """Monotonic, seconds."""
    caches: bool = False
    fence_s: float = 0.0
    """As it was told."""
    answered_at: float = float("-inf")
    """When it was last told that the number is its own; monotonic, seconds."""


class ShardMap:
    """Numbers, epochs and leases of the shards outside this process. Thread-safe.

    Args:
        folder: the catalog's data directory.
        lease_s: a shard that was not heard of for so long is down.
        fence_s: one that was not heard of for so long answers nothing: another process may be it.
        own: this process's own shard as it is now; None where it holds none.
    """

    def __init__(
        self, folder: Path, lease_s: float, fence_s: float, own: Callable[[], ShardEntry | None]
    ) -> None:
        self.catalog = uuid.uuid4().hex
        self.lease_s = lease_s
        self._fence_s = max(fence_s, lease_s)
        self._path = folder / FILE_NAME
        self._own = own
        self._lock = threading.Lock()
        self._log = logger("arrow_tq.cluster")
        self._version, self._members = self._load()
        self._shown_up = dict.fromkeys(self._members, True)

    def map(self) -> ClusterMap:
        """The map as it is now."""
        with self._lock:
            up = {number: self._is_up(member) for number, member in self._members.items()}
            if up != self._shown_up:
                self._shown_up = up
                self._version += 1
            entries = [_entry(member, up[number]) for number, member in sorted(self._members.items())]
            version = self._version
        own = self._own()
        shards = entries if own is None else [own, *entries]
        return ClusterMap(version=version, catalog=self.catalog, lease_s=self.lease_s, shards=shards)

    @property
    def has_members(self) -> bool:
        """Whether any shard ever joined."""
        return bool(self._members)

    def members(self) -> list[Member]:
        """Every shard that ever joined."""
        with self._lock:
            return list(self._members.values())

    def member(self, number: int) -> Member | None:
        """The shard of this number, up or not."""
        return self._members.get(number)

    def is_up(self, number: int) -> bool:
        """Whether its lease has not run out."""
        member = self._members.get(number)
        return member is not None and self._is_up(member)

    def is_current(self, seen: Member) -> bool:
        """Whether the process that was seen is the shard still."""
        member = self._members.get(seen.number)
        return member is not None and member.epoch == seen.epoch

    def join(self, command: JoinCluster) -> Joined:
        """Take a shard in, in a new epoch: the process that was it before answers nothing by now.

        A data directory keeps its number. A new one gets the lowest number that was never given: the
        chunks of a number that is gone must not seem to be here.

        Raises:
            Conflict: another data directory has the number that it says it had.
            Unavailable: no number is left; or the process before may still answer.
        """
        with self._lock:
            member = next((one for one in self._members.values() if one.node == command.node), None)
            if member is None and command.number is not None:
                taken = self._members.get(command.number)
                if taken is not None or command.number == OWN_NUMBER:
                    raise Conflict(
                        f"shard {command.number}: it belongs to another data directory; a new shard starts "
                        "with an empty one",
                        number=command.number,
                    )
            if member is not None:
                _check_free(member, command)
            number = self._number(command) if member is None else member.number
            epoch = 1 if member is None else member.epoch + 1
            now = time.monotonic()
            joined = Member(
                number=number,
                epoch=epoch,
                node=command.node,
                lock=command.lock,
                server=command.server,
                capacity_bytes=command.capacity_bytes,
                used_bytes=command.used_bytes,
                seen_at=now,
                caches=command.caches,
                fence_s=self._fence_s,
                answered_at=now,
            )
            members = {**self._members, number: joined}
            self._store(self._version + 1, members)
            self._members, self._version = members, self._version + 1
            self._shown_up[number] = True
        self._log.info("shard joined", number=number, epoch=epoch, url=command.server.url)
        return Joined(
            number=number, epoch=epoch, lease_s=self.lease_s, fence_s=self._fence_s, catalog=self.catalog
        )

    def beat(self, command: Beat) -> None:
        """A shard is still there.

        Raises:
            NotFound: no such shard.
            StaleEpoch: another process joined as this shard since.
        """
        with self._lock:
            member, now = self._known(command), time.monotonic()
            self._members[command.number] = replace(
                member,
                used_bytes=command.used_bytes,
                capacity_bytes=command.capacity_bytes,
                seen_at=now,
                answered_at=now,
            )

    def leave(self, command: LeaveCluster) -> None:
        """A shard answers nothing from now on: it is down, and its number free for whoever has its chunks.

        Raises:
            NotFound, StaleEpoch: as of a beat.
        """
        with self._lock:
            gone = float("-inf")
            member = self._known(command)
            self._members[command.number] = replace(member, seen_at=gone, answered_at=gone)
        self._log.info("shard left", number=command.number, epoch=command.epoch, url=member.server.url)

    def fills(self, seen: Member, used_bytes: int) -> None:
        """The shard says how full it is between beats too: what was committed counts at once."""
        with self._lock:
            if self.is_current(seen):
                self._members[seen.number] = replace(self._members[seen.number], used_bytes=used_bytes)

    def lost_touch(self, number: int) -> None:
        """A call to the shard failed: until it beats again it is down, whatever is left of its lease."""
        with self._lock:
            member = self._members.get(number)
            if member is not None and self._is_up(member):
                self._members[number] = replace(member, seen_at=float("-inf"))
                self._log.warning("shard out of reach", number=number, url=member.server.url)

    def _known(self, command: Beat | LeaveCluster) -> Member:
        """The member that says so. Raises ``NotFound``, or ``StaleEpoch`` for one that was replaced."""
        member = self._members.get(command.number)
        if member is None:
            raise NotFound(f"shard {command.number} never joined", number=command.number)
        if (member.epoch, member.lock) != (command.epoch, command.lock):
            raise StaleEpoch(
                f"shard {command.number}: epoch {command.epoch} is over, {member.server.url} holds it in "
                f"epoch {member.epoch}",
                epoch=command.epoch,
                current=member.epoch,
            )
        return member

    def _is_up(self, member: Member) -> bool:
        return time.monotonic() - member.seen_at < self.lease_s

    def _number(self, command: JoinCluster) -> int:
        if command.number is not None:
            # The map was lost, or the shard comes from another catalog: its chunks name the number.
            return command.number
        number = max(self._members, default=OWN_NUMBER) + 1
        if number > SHARD_MAX:
            raise Unavailable(f"the cluster has given all {SHARD_MAX} shard numbers")
        return number

    def _load(self) -> tuple[int, dict[int, Member]]:
        if not self._path.exists():
            return 1, {}
        raw = json.loads(self._path.read_text())
        now = time.monotonic()
        members = [
            Member(
                number=one["number"],
                epoch=one["epoch"],
                node=one["node"],
                lock=one.get("lock", ""),
                server=ShardServer.model_validate(one["server"]),
                capacity_bytes=one["capacity_bytes"],
                used_bytes=0,
                seen_at=now,
                caches=one["caches"],
                fence_s=one.get("fence_s", self._fence_s),
                # Whatever it was told by the catalog before this one, it was told before now.
                answered_at=now,
            )
            for one in raw["shards"]
        ]
        return int(raw["version"]) + 1, {member.number: member for member in members}

    def _store(self, version: int, members: dict[int, Member]) -> None:
        """On disk before anybody is told."""
        shards = [
            {
                "number": one.number,
                "epoch": one.epoch,
                "node": one.node,
                "lock": one.lock,
                "server": one.server.model_dump(),
                "capacity_bytes": one.capacity_bytes,
                "caches": one.caches,
                "fence_s": one.fence_s,
            }
            for one in members.values()
        ]
        part = self._path.with_suffix(".part")
        with part.open("w") as file:
            file.write(json.dumps({"version": version, "shards": shards}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)


def _check_free(member: Member, command: JoinCluster) -> None:
    """Raise ``Unavailable`` while the process that was the shard before may still answer."""
    left_s = member.answered_at + member.fence_s - time.monotonic()
    # Who has locked the same file has seen the one before end.
    if command.lock == member.lock or left_s <= 0:
        return
    raise Unavailable(
        f"shard {member.number}: {member.server.url} may still answer as it, for {left_s:.1f} s if it is not "
        "heard of again: try again",
        number=member.number,
        left_s=left_s,
    )


def _entry(member: Member, up: bool) -> ShardEntry:
    return ShardEntry(
        number=member.number,
        epoch=member.epoch,
        servers=[member.server],
        capacity_bytes=member.capacity_bytes,
        used_bytes=member.used_bytes,
        up=up,
        caches=member.caches,
    )
