"""What a shard's process was told by its catalog at the last join, and for how long that holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

DRIFT = 0.01
"""By which the clocks of two machines may differ in rate: a shard's own end comes so much earlier."""


@dataclass(frozen=True, slots=True)
class Place:
    """A number in an epoch.

    Args:
        number: the shard's.
        epoch: of it.
        lease_s: after so long without a beat it asks before it answers.
        fence_s: after so long without a beat it answers nothing: another process may be the shard.
        since_s: when the last question that was answered was asked, by ``clock_s``; not when its answer came,
            which a stopped process finds out later than anybody.
    """

    number: int
    epoch: int
    lease_s: float
    fence_s: float
    since_s: float

    def leased(self, now_s: float) -> bool:
        """Whether the catalog counts on it still."""
        return now_s - self.since_s < self.lease_s

    def holds(self, now_s: float) -> bool:
        """Whether nobody else can be the shard."""
        return now_s - self.since_s < self.fence_s * (1 - DRIFT)

    def renewed(self, since_s: float) -> Place:
        """After a beat that was asked then."""
        return replace(self, since_s=since_s)


def clock_s() -> float:
    """Seconds that go on while the machine is suspended, which those of ``time.monotonic`` do not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
