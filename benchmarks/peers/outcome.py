"""What one system did with one payload."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """What one system did with one payload; times in seconds, the first round apart.

    ``failed`` says why there is nothing.
    """

    system: str
    payload: str
    samples: int = 0
    whole: int = 0
    """Samples that the payload has where memory allows."""
    nbytes: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    failed: str | None = None

    def add(self, reply: dict[str, object]) -> None:
        for name, value in reply.items():
            if name.endswith("_s") and isinstance(value, float):
                self.times.setdefault(name, []).append(value)

    def cold(self, name: str) -> float:
        return self.times[name][0]

    def warm(self, name: str) -> float:
        """The median of all rounds but the first (of the only one, if there is one)."""
        values = self.times[name]
        return statistics.median(values[1:] or values)
