"""Tells the store that chunks without a step yet are still wanted, for as long as their writer lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from arrow_tq.calls import ask
from arrow_tq_schemas.commands import Done, KeepChunks
from arrow_tq_schemas.errors import ArrowTQError

if TYPE_CHECKING:
    from arrow_tq.runs import Run

KEEP_S = 60.0
"""How often. Well below a store's time to live of orphans, which is for writers that died."""
IDS_A_CALL_MAX = 10_000
"""Chunk ids that one command names."""


def keep(run: Run, names: list[str]) -> None:
    """Let the time to live of these chunks begin anew.

    A store out of reach is not an error: the next round tries again, and a chunk that was reaped meanwhile
    fails the commit of its step, which names it.
    """
    for first in range(0, len(names), IDS_A_CALL_MAX):
        try:
            ask(run.backend, KeepChunks(run=run.name, chunk_ids=names[first : first + IDS_A_CALL_MAX]), Done)
        except ArrowTQError:
            return


class Keeper:
    """A thread that keeps what ``wanted`` names, every ``KEEP_S``."""

    def __init__(self, run: Run, wanted: Callable[[], list[str]]) -> None:
        self._run = run
        self._wanted = wanted
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="arrow-tq-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _loop(self) -> None:
        while not self._stopped.wait(KEEP_S):
            keep(self._run, self._wanted())
