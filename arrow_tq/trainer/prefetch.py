"""Fetches the next micro-batches while one is in use, never more bytes ahead than allowed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from arrow_tq.trainer.data import Data
from arrow_tq_schemas.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from arrow_tq.trainer.micro import MicroBatch

AHEAD_BYTES = 1 << 30
"""Bytes of buffers that are fetched, or being fetched, before they are asked for."""
STOP_S = 60.0
"""How long ``close`` waits for a fetch under way."""


class Prefetch(Iterator[tuple["MicroBatch", "Data"]]):
    """``for micro, data in plan.prefetch([...])``: the next micro-batches are fetched in the background.

    One thread fetches them in order. What is ready or under way is at most ``ahead_bytes``, but for a
    micro-batch that is larger by itself, which is fetched when nothing else is ahead; the one that was
    handed out does not count. An error is raised where its micro-batch would be; iterating may then go on
    with the next. The thread starts at the first ``next``, and ends with the last, with ``close`` or when
    this is collected.

    Args:
        micros: what to fetch, in order.
        fields: names of the run's fields.
        layers: global layer ids, as for ``fetch``.
        ahead_bytes: the bound.
    """

    def __init__(
        self,
        micros: Sequence[MicroBatch],
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._micros = list(micros)
        self._next = 0
        self._state = _State(self._micros, fields, layers, ahead_bytes)
        self._thread: threading.Thread | None = None
        if ahead_bytes < 1:
            raise InvalidInput(f"ahead_bytes {ahead_bytes}: expected 1 or more")

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> tuple[MicroBatch, Data]:
        if self._next >= len(self._micros) or self._state.closed:
            self.close()
            raise StopIteration
        if self._thread is None:
            # The thread knows the state alone, so that this object can be collected while it waits.
            self._thread = threading.Thread(target=self._state.work, name="arrow-tq-prefetch", daemon=True)
            self._thread.start()
        micro = self._micros[self._next]
        self._next += 1
        answer = self._state.take()
        if isinstance(answer, BaseException):
            raise answer
        micro.keep(answer)
        return micro, answer

    @property
    def ahead_bytes(self) -> int:
        """Bytes that are ready or under way now."""
        return self._state.ahead

    def close(self) -> None:
        """Stop fetching and let go of what nobody took. Idempotent."""
        self._state.close()
        if self._thread is not None:
            self._thread.join(STOP_S)
            self._thread = None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._state.close()


class _State:
    """What the thread and the iterator share."""

    def __init__(
        self,
        micros: Sequence[MicroBatch],
        fields: str | Sequence[str],
        layers: Sequence[int] | None,
        ahead_bytes: int,
    ) -> None:
        self._micros = micros
        self._fields = fields
        self._layers = layers
        self._bound = ahead_bytes
        self._changed = threading.Condition()
        self._ready: deque[tuple[Data | BaseException, int]] = deque()
        self.ahead = 0
        self.closed = False

    def work(self) -> None:
        """The thread: one micro-batch after another."""
        for micro in self._micros:
            size = 0
            try:
                wanted = micro.fetch_bytes(self._fields, self._layers)
                if not self._wait_for_room(wanted):
                    return
                size = wanted
                answer: Data | BaseException = micro.batch.fetch(self._fields, self._layers, micro.rows)
            except BaseException as error:
                # Whatever it was, it belongs to whoever asks for this micro-batch.
                answer = error
            with self._changed:
                if self.closed:
                    return
                self._ready.append((answer, size))
                self._changed.notify_all()

    def take(self) -> Data | BaseException:
        """The next answer, waiting for it."""
        with self._changed:
            while not self._ready:
                if self.closed:
                    raise Conflict("this prefetch was closed while its next micro-batch was waited for")
                self._changed.wait()
            answer, size = self._ready.popleft()
            self.ahead -= size
            self._changed.notify_all()
            return answer

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _wait_for_room(self, size: int) -> bool:
        """Whether to go on; counts the bytes as ahead."""
        with self._changed:
            while not self.closed and self.ahead and self.ahead + size > self._bound:
                self._changed.wait()
            self.ahead += size
            return not self.closed
