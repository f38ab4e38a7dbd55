"""Which shard new chunks go to, and which machine this is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from arrow_tq_schemas.cluster import ClusterMap, ShardEntry

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STAY_S, STAY_BYTES = 0.25, 64 << 20
"""How long, and for how many bytes about, all new chunks of a client go to the same shard."""
GOLDEN = (5**0.5 - 1) / 2


class Placing:
    """The shard that all new chunks of a client go to for the moment.

    Any thread may call; two that choose at the same time agree on one or begin a moment each.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._chance = random.random()
        """Stepped by the golden ratio: shares of the free bytes are then kept within few moments."""
        self._moment: tuple[int, ClusterMap, float] | None = None
        self._bytes = 0

    def present(self, known: ClusterMap, now: float) -> int | None:
        """The shard of this moment; None where it is over, or the map is another."""
        moment = self._moment
        if moment is None or self._bytes >= STAY_BYTES:
            return None
        number, of_map, until = moment
        return number if of_map is known and now < until else None

    def next(self, shards: Sequence[ShardEntry], known: ClusterMap, now: float) -> int:
        """Begin another moment, on one of these shards."""
        self._chance = (self._chance + GOLDEN) % 1.0
        number = choose(shards, self._host, self._chance)
        self._bytes = 0
        self._moment = number, known, now + STAY_S
        return number

    def add(self, size: int) -> None:
        """So many bytes were placed. Without a lock: about so many is enough."""
        self._bytes += size


def choose(shards: Sequence[ShardEntry], host: str, chance: float) -> int:
    """Of these shards one on ``host`` if there is any; the more bytes are free there, the likelier.

    Args:
        shards: at least one.
        host: boot id of the writer's machine.
        chance: from 0 to 1: which of them, by their shares of the free bytes.
    """
    near = [one for one in shards if is_on(one, host)]
    near = [one for one in near if _free(one)] or near
    pool = near if any(_free(one) for one in near) else list(shards)
    free = [_free(one) for one in pool]
    left = chance * sum(free)
    for one, size in zip(pool, free, strict=True):
        left -= size
        if left < 0:
            return one.number
    return pool[-1].number


def is_on(entry: ShardEntry, host: str) -> bool:
    """Whether one of the shard's servers is on this machine, as they say themselves."""
    return any(server.host == host for server in entry.servers)


def boot_id() -> str:
    """This machine since it was started: equal where memory can be shared."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _free(entry: ShardEntry) -> int:
    return max(entry.capacity_bytes - entry.used_bytes, 0)
