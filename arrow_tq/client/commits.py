"""Step commits: what many threads want committed at one time travels in one message."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic, sleep

from pydantic_core import PydanticSerializationError

from arrow_tq.client.commit_stream import WHAT, CommitChannel
from arrow_tq.client.connection import Connection
from arrow_tq_schemas.commands import StepCommit, StepResult
from arrow_tq_schemas.errors import (
    ArrowTQError,
    Conflict,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    from_wire,
)

STEPS_A_MESSAGE_MAX = 256
MESSAGE_BYTES_AIM = 8 << 20


class Waiting:
    """A step that some thread waits for."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: ArrowTQError | None = None

    def finish(self, result: StepResult | None, error: ArrowTQError | None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def wait(self, timeout_s: float) -> StepResult | None:
        """The result, None where there is none in time; raises what became of the call."""
        if not self._done.wait(timeout_s):
            return None
        if self._error is not None:
            # A copy: a whole group of threads may raise it.
            raise from_wire(self._error.to_wire())
        return self._result


class Commits:
    """The commit stream of one connection, and the thread that serves it while there is work."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._options = connection.options
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._thread: threading.Thread | None = None
        self._finishing = False
        self._closed = False

    def commit(self, step: StepCommit) -> StepResult:
        """Commit one step; returns its result, error included.

        Raises:
            Unreachable, DeadlineExceeded: whether it was committed is not known; the same step id again
                gives the same answer.
        """
        try:
            waiting = Waiting(step.model_dump_json().encode())
        except (PydanticSerializationError, UnicodeEncodeError) as error:
            raise InvalidInput(f"{WHAT} {step.step_id!r}: {error}", step_id=step.step_id) from None
        with self._changed:
            if self._closed:
                raise Conflict(f"{WHAT}: the connection to {self._connection.url} was closed")
            self._queue.append(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="arrow-tq-commits", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        result = waiting.wait(self._options.commit_s)
        if result is None:
            raise DeadlineExceeded(
                f"{WHAT} {step.step_id!r}: no answer from {self._connection.url} within "
                f"{self._options.commit_s:g} s",
                step_id=step.step_id,
            )
        return result

    def finish(self, timeout_s: float) -> None:
        """End the stream once nothing waits for it; the next commit opens another."""
        with self._changed:
            thread, self._finishing = self._thread, self._thread is not None
            self._changed.notify_all()
        if thread is not None:
            thread.join(max(timeout_s, 0.0))

    def close(self, timeout_s: float) -> None:
        """End for good."""
        with self._changed:
            self._closed = True
        self.finish(timeout_s)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        channel: CommitChannel | None = None
        while (group := self._take()) is not None:
            if channel is not None and channel.old:
                channel.close()
                channel = None
            channel = self._exchange(channel, group)
        if channel is not None:
            channel.close()

    def _take(self) -> list[Waiting] | None:
        """What waits now; None once nothing came for a while, and this thread is no longer the one."""
        with self._changed:
            until = monotonic() + self._options.stream_idle_s
            while not self._queue:
                left = until - monotonic()
                if left <= 0 or self._finishing or self._closed:
                    self._thread, self._finishing = None, False
                    return None
                self._changed.wait(left)
            group: list[Waiting] = []
            size = 0
            while self._queue and len(group) < STEPS_A_MESSAGE_MAX and size < MESSAGE_BYTES_AIM:
                group.append(self._queue.popleft())
                size += len(group[-1].raw)
            return group

    def _exchange(self, channel: CommitChannel | None, group: Sequence[Waiting]) -> CommitChannel | None:
        """Send a group and hand out its results; returns the channel if it still works."""
        steps = [waiting.raw for waiting in group]
        try:
            channel, results = self._send(channel, steps)
        except ArrowTQError as error:
            failure = error
        except Exception as error:
            failure = InternalError(f"{WHAT}: {type(error).__name__}: {error}")
        else:
            for waiting, result in zip(group, results, strict=True):
                waiting.finish(result, None)
            return channel
        if len(group) > 1 and not failure.retryable:
            # The server could not read the message: whoever is at fault must not fail the others.
            channel = None
            for waiting in group:
                channel = self._exchange(channel, [waiting])
            return channel
        for waiting in group:
            waiting.finish(None, failure)
        return None

    def _send(
        self, channel: CommitChannel | None, steps: Sequence[bytes]
    ) -> tuple[CommitChannel, list[StepResult]]:
        """One exchange, and once more on a new stream where the first did not get through."""
        try:
            channel = channel or CommitChannel(self._connection)
            return channel, channel.exchange(steps)
        except ArrowTQError as error:
            if not error.retryable:
                raise
        sleep(self._options.retry_pause_s)
        self._connection.renew()
        channel = CommitChannel(self._connection)
        return channel, channel.exchange(steps)
