"""Looking after what marks keep: freeing it piece by piece, and giving it up for its room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from arrow_tq.store.catalog.database import Readers
from arrow_tq.store.catalog.kept import (
    FREED_MAX,
    free_spent,
    something_is_kept,
    something_is_spent,
    spend_for_room,
)
from arrow_tq.store.catalog.writer import Change

Result = TypeVar("Result")
PIECES_MAX = 20
"""Pieces freed in one go: a caller waits for them, and so do leases that upkeep looks after."""


class RunOperation(Protocol):
    """Runs one operation in the writer: its result, its released chunks dropped, its error raised."""

    def __call__(self, apply: Callable[[Change], Result], /) -> Result: ...


class Keeping:
    """What runs keep for a rewind. Thread-safe."""

    def __init__(self, readers: Readers, run: RunOperation) -> None:
        self._readers = readers
        self._run = run

    def is_empty(self) -> bool:
        """Whether no mark of any run keeps anything."""
        with self._readers.snapshot() as connection:
            return not something_is_kept(connection)

    def give_up_oldest(self) -> tuple[str, int] | None:
        """Free what the mark with the oldest kept release keeps, for its room.

        Its name, and how many pairs of segment and task; None where nothing is kept.
        """
        spent = self._run(spend_for_room)
        self.free_spent()
        return spent

    def free_spent(self) -> None:
        """Free what spent marks kept, a bounded piece a transaction: commits go on in between.

        Some of it, if it is much: upkeep goes on with the rest.
        """
        with self._readers.snapshot() as connection:
            if not something_is_spent(connection):
                return
        for _ in range(PIECES_MAX):
            if self._run(free_spent) < FREED_MAX:
                return
