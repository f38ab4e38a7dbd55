"""Which shard new chunks go to, and which machine this is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from arrow_tq_schemas.cluster import ShardEntry

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
