"""Rows read in a thread, a bounded number of messages ahead of whoever takes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from arrow_tq.backend import Rows
from arrow_tq_schemas.errors import ArrowTQError, InternalError

Item = Rows | ArrowTQError | None
"""Rows, why there are no more, or None at the end."""


class ReadAhead:
    """A thread that reads from its ``start`` until ``stop``.

    Args:
        open_source: gives the rows; called in the thread.
        ahead_max: messages that may wait to be taken.
        what: what is read, for errors that nobody foresaw.
        thread_name: of the thread.
    """

    def __init__(
        self, open_source: Callable[[], Iterator[Rows]], ahead_max: int, what: str, thread_name: str
    ) -> None:
        self._open_source = open_source
        self._what = what
        self._queue: queue.Queue[Item] = queue.Queue(ahead_max)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, timeout_s: float | None = None) -> Rows | None:
        """The next rows, None at the end; raises the source's error, ``queue.Empty`` after ``timeout_s``."""
        item = self._queue.get(timeout=timeout_s)
        if isinstance(item, ArrowTQError):
            raise item
        return item

    def stop(self) -> None:
        """Nobody takes the rest: let the thread see it."""
        self._stopped = True
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return

    def _run(self) -> None:
        try:
            for rows in self._open_source():
                self._queue.put(rows)
                if self._stopped:
                    # The source ends with its last reference, which was this loop's.
                    return
        except ArrowTQError as error:
            self._queue.put(error)
        except Exception as error:
            self._queue.put(InternalError(f"{self._what}: {type(error).__name__}: {error}"))
        else:
            self._queue.put(None)
