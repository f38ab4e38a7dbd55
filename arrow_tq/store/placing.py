"""Room for a chunk, where it will stay: reserved, filled by whoever has the rows, then published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from arrow_tq import backend
from arrow_tq.backend import Header
from arrow_tq.layout.appender import Reserved
from arrow_tq.layout.columns import Values
from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.extent_key import ExtentKey, Tier
from arrow_tq.store.stream import Stream
from arrow_tq_schemas.commands import Durability
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId

if TYPE_CHECKING:
    from arrow_tq.store.shard import Shard

Held = Sequence[tuple[Stream, Extent, Reserved]]


class Place:
    """Implements ``backend.Place`` over the live extents of a field, one a layer group, their locks held."""

    def __init__(self, shard: Shard, held: Held) -> None:
        self._shard = shard
        self._held = held
        self._stored: list[tuple[Stream, ChunkId, Entry]] = []

    @property
    def values(self) -> list[Values]:
        return [reserved.values for _, _, reserved in self._held]

    def publish(self, headers: Sequence[Header]) -> None:
        try:
            for (stream, extent, reserved), header in zip(self._held, headers, strict=True):
                if self._shard.is_here(header.chunk_id, extent.key.run, header.checksum):
                    continue
                entry = extent.complete(
                    *(header.chunk_id, reserved, header.raw, header.epoch, header.start, header.checksum)
                )
                self._shard.publish(stream, header.chunk_id, entry)
                self._stored.append((stream, header.chunk_id, entry))
        finally:
            self.abandon()

    def abandon(self) -> None:
        held, self._held = self._held, ()
        let_go(held)

    def withdraw(self) -> None:
        self._shard.withdraw(self._stored)


class EnginePlacer:
    """Implements ``backend.Placer`` in the engine's own process.

    Whoever has a place keeps other writers of the field out until it is published or abandoned. There is none
    where one of them is at work: two that convert at a time are faster than one that waits.
    """

    def __init__(self, engine: Placing, shard: Shard) -> None:
        self._engine = engine
        self._shard = shard

    def reserve(self, field: Field, run: str, rows: int, header_bytes: int, shard: int) -> Place | None:
        """Here, whichever ``shard`` is meant: there is one."""
        self._shard.check_process()
        tier: Tier = "disk" if self._engine.durability(run) == "disk" else "memory"
        held: list[tuple[Stream, Extent, Reserved]] = []
        try:
            for group in range(len(field.groups)):
                stream = self._shard.locked_stream_at_once(ExtentKey(run, field.name, group, tier), field)
                if stream is None:
                    let_go(held)
                    return None
                held.append(self._room(stream, rows, header_bytes))
        except BaseException:
            let_go(held)
            raise
        return Place(self._shard, held)

    def _room(self, stream: Stream, rows: int, header_bytes: int) -> tuple[Stream, Extent, Reserved]:
        """Room in a stream whose lock is held, and stays so unless there is none."""
        try:
            self._shard.check_open(f"put to run {stream.key.run!r}")
            extent = stream.room(rows)
            return stream, extent, extent.reserve(rows, header_bytes)
        except BaseException:
            stream.lock.release()
            raise

    def stored(self, run: str, places: Sequence[backend.Place]) -> Stored:
        self._engine.sync(run)
        return STORED


class Placing(Protocol):
    """What a placer asks of its engine."""

    def durability(self, run: str) -> Durability:
        """Of the run; raises ``Conflict`` where the engine is closed."""

    def sync(self, run: str) -> None:
        """Return when what was put before is as durable as the run declares."""


class Stored:
    """The handle of a put that is finished when it returns."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing to wait for."""


STORED = Stored()


def let_go(held: Held) -> None:
    """Let other writers in."""
    for stream, _, _ in held:
        stream.lock.release()
