"""The batches that this process has: where positions of handles are looked up."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arrow_tq.trainer.batch import Batch


class Batches:
    """Batches of a run that were claimed or attached here, and are neither released nor collected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def add(self, batch: Batch) -> None:
        with self._lock:
            self._alive.add(batch)

    def discard(self, batch: Batch) -> None:
        with self._lock:
            self._alive.discard(batch)

    def alive(self) -> list[Batch]:
        with self._lock:
            return list(self._alive)
