"""What a system must be able to do to take part, and the table of those that do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from benchmarks.peers.payloads import Payload

WRITERS = 16
"""Trajectories that are put at a time, as so many rollouts that finish in the same moment."""

One = TypeVar("One")
Other = TypeVar("Other")


class Endpoint(Protocol):
    """One process's end of a system.

    A payload's ``unit`` says how it is put: whole, or each trajectory by itself.
    """

    def build(self, payload: Payload) -> object:
        """The payload in the form that ``put`` takes; timed apart from it."""

    def put(self, value: object) -> object:
        """Store it; the reference, once a consumer elsewhere can read it."""

    def share(self, reference: object) -> object:
        """The reference as JSON. Not timed: how it travels is another system's work."""

    def receive(self, shared: object) -> object:
        """The reference, at the consumer. Not timed."""

    def get(self, reference: object, layers: range | None) -> object:
        """The value. ``layers``: those alone, where the system can ask for a part."""

    def rows(self, value: object) -> dict[str, object]:
        """A list of rows a field; timed apart from ``get``."""

    def remove(self, shared: object) -> None:
        """Free it."""

    def close(self) -> None:
        """Leave."""


def at_once(work: Callable[[One], Other], values: Sequence[One]) -> list[Other]:
    """The work on each value, ``WRITERS`` at a time; every system's trajectories are put like this."""
    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(work, values))


class System(Protocol):
    """A module of a system: how its servers are started and how a process joins."""

    def servers(self) -> AbstractContextManager[str]:
        """Start them; the address that ``join`` takes."""

    def join(self, address: str, role: str) -> Endpoint:
        """Join as ``producer`` or ``consumer``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a system is, and what has to be installed for it."""

    module: str
    package: str
    install: str
    """What to install, for whoever reads that it is missing."""
    layers: bool = False
    """Whether it can be asked for some layers only."""


SYSTEMS = {
    "arrow-tq": Entry("benchmarks.peers.ours", "arrow_tq", "arrow-tq[server]", layers=True),
    "ray": Entry("benchmarks.peers.ray_store", "ray", "ray"),
    "mooncake": Entry(
        "benchmarks.peers.mooncake",
        "mooncake.store",
        "mooncake-transfer-engine-non-cuda; Debian: libibverbs1 librdmacm1 libnuma1 libcurl4",
    ),
    "transfer-queue": Entry(
        "benchmarks.peers.transfer_queue_store", "transfer_queue", "TransferQueue tensordict ray torch"
    ),
}


def load(name: str) -> System:
    """The system's module.

    Raises:
        ImportError: it is not installed; says what is missing.
    """
    entry = SYSTEMS[name]
    importlib.import_module(entry.package)
    module: System = importlib.import_module(entry.module)  # type: ignore[assignment]
    return module
