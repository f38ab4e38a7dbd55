"""Step commits of many threads in this process, taken together.

One caller at a time leads: it commits every step that waits, its own among them, and hands over to the first
that came meanwhile. A thread then costs one wake-up a commit, whatever the others do; let each commit for
itself, and they spend their time handing the interpreter and the session locks to one another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from arrow_tq_schemas.commands import StepCommit, StepResult

STEPS_MAX = 256
"""Steps that one leader takes at most, about: it is a caller too, and wants to go on."""
SHARED_MAX = 32
"""Steps of one call that share a commit with others. More are a commit worth its while by themselves."""


@dataclass(slots=True, eq=False)
class _Waiting:
    steps: Sequence[StepCommit]
    results: list[StepResult] | None = None
    error: BaseException | None = None
    leads: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held until there are results, an error, or the lead to take."""


class Commits:
    """``commit`` may be called from any thread."""

    def __init__(self, commit_many: Callable[[Sequence[StepCommit]], list[StepResult]]) -> None:
        self._commit_many = commit_many
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._led = False

    def commit(self, steps: Sequence[StepCommit]) -> list[StepResult]:
        """The steps' results once they are committed; raises what failed for all of a batch."""
        if not _can_share(steps):
            return self._commit_many(steps)
        mine = _Waiting(steps)
        mine.turn.acquire()
        with self._lock:
            self._waiting.append(mine)
            mine.leads, self._led = not self._led, True
        if not mine.leads:
            self._wait(mine)
        if mine.leads:
            self._lead()
        if mine.error is not None:
            raise mine.error
        assert mine.results is not None
        return mine.results

    def _wait(self, mine: _Waiting) -> None:
        try:
            mine.turn.acquire()
        except BaseException:
            # An interrupt. The steps may be committed or not; the lead must not end here.
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    if mine.leads:
                        self._hand_over()
            raise

    def _hand_over(self) -> None:
        """Under the lock: the first that waits leads from now on."""
        self._led = bool(self._waiting)
        if self._led:
            self._waiting[0].leads = True
            self._waiting[0].turn.release()

    def _lead(self) -> None:
        """Commit what waits, the caller's own steps first, and hand over."""
        batch: list[_Waiting] = []
        steps: list[StepCommit] = []
        with self._lock:
            while self._waiting and len(steps) < STEPS_MAX:
                batch.append(self._waiting.popleft())
                steps += batch[-1].steps
        try:
            results = iter(self._commit_many(steps))
            for waiting in batch:
                waiting.results = [next(results) for _ in waiting.steps]
        except BaseException as error:
            # Each caller raises it: a store that was closed is closed to all of them.
            for waiting in batch:
                waiting.error = error
        finally:
            with self._lock:
                self._hand_over()
            for waiting in batch[1:]:
                waiting.turn.release()


def _can_share(steps: Sequence[StepCommit]) -> bool:
    """A few steps, of different sessions: those of one follow one another, and the others would wait."""
    if len(steps) <= 1:
        return True
    return len(steps) <= SHARED_MAX and len({(one.run, one.session_id) for one in steps}) == len(steps)
