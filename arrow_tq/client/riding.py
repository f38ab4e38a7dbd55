"""Chunks that were written in place, and that leave with the message that commits their step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arrow_tq.backend import PutHandle
from arrow_tq.client.pending import JoinedPuts, PendingPut
from arrow_tq_schemas.commands import AdoptChunks, Wire
from arrow_tq_schemas.errors import ArrowTQError


@dataclass(frozen=True, slots=True)
class Rider:
    """A command that goes along with whatever leaves."""

    command: AdoptChunks
    told: Callable[[Wire | ArrowTQError], None]
    """Hears its reply, or its error, on the stream's thread: quick, and raises nothing."""


class Cargo(Protocol):
    """What waits for a message that leaves anyway."""

    def load(self) -> Sequence[Rider]:
        """All that waits, in order. Called by one thread at a time, which sends them in this order."""


class RidingPut(PendingPut):
    """A put whose chunks are in every message of steps that leaves after it, or are stored already."""


def wait_for_others(puts: Iterable[PutHandle], wait_s: float | None) -> list[RidingPut]:
    """Those that travel with their step's commit, once all others are stored; raises their first error."""
    riding: list[RidingPut] = []
    for put in puts:
        for one in put.handles if isinstance(put, JoinedPuts) else (put,):
            if isinstance(one, RidingPut):
                riding.append(one)
            else:
                one.wait(wait_s)
    return riding
