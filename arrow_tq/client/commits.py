"""Step commits, and what comes before and after: what many threads ask at one time travels in one message."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic, sleep

from pydantic_core import PydanticSerializationError

from arrow_tq.client.commit_stream import WHAT, Asked, CommitChannel, Section, Told
from arrow_tq.client.connection import Connection
from arrow_tq.client.riding import Cargo, Rider
from arrow_tq_schemas.commands import (
    AdoptChunks,
    Command,
    FinalizeSession,
    OpenSession,
    StepCommit,
    StepResult,
    StreamAnswer,
    Streamed,
    Wire,
)
from arrow_tq_schemas.errors import (
    ArrowTQError,
    Conflict,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    from_wire,
)

COMMANDS_A_MESSAGE_MAX = 256
MESSAGE_BYTES_AIM = 8 << 20
GATHER_S, GATHER_SHARE = 0.0015, 0.5
"""How long the next message waits for the threads that the last one answered, at most, and of what that took:
a message costs both ends what three or four commands do."""
GATHER_POLL_S = 0.0003


SECTIONS: dict[type[Command], Section] = {
    AdoptChunks: "adopts",
    OpenSession: "opens",
    FinalizeSession: "finalizes",
}


class Waiting:
    """A command that some thread waits for."""

    def __init__(self, asked: Asked, what: str) -> None:
        self.asked = asked
        self.what = what
        self.asker = threading.get_ident()
        self._told: Told | None = None
        self._error: ArrowTQError | None = None
        # Held until it is told: an event would be a condition, with a lock and a queue of its own.
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self, told: Told | None, error: ArrowTQError | None) -> None:
        self._told, self._error = told, error
        self._done.release()

    def wait(self, until: float) -> Told | None:
        """What it was told, None where that is nothing in time; raises what became of the call."""
        if not self._done.acquire(timeout=max(until - monotonic(), 0.0)):
            return None
        if self._error is not None:
            # A copy: a whole group of threads may raise it.
            raise from_wire(self._error.to_wire())
        return self._told


class Riding:
    """A command that nobody waits for in person."""

    def __init__(self, rider: Rider) -> None:
        self.asked = Asked(SECTIONS[AdoptChunks], rider.command.model_dump_json().encode())
        self._what = rider.command.verb
        self._told = rider.told

    def finish(self, told: Told | None, error: ArrowTQError | None) -> None:
        self._told(error if told is None and error is not None else _body(self._what, told))


class Commits:
    """The commit stream of one connection, and the thread that serves it while there is work."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._options = connection.options
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._cargo: Cargo | None = None
        self._leaving = False
        self._thread: threading.Thread | None = None
        self._finishing = False
        self._closed = False

    def carry(self, cargo: Cargo) -> None:
        """From now on what it loads goes along with each message of steps, and is done before these."""
        self._cargo = cargo

    def leave(self) -> None:
        """Have a message leave with what is to be loaded, and what else there is. Raises ``Conflict``."""
        with self._changed:
            self._wake()
            self._leaving = True

    def commit(self, step: StepCommit) -> StepResult:
        """Commit one step; returns its result, error included.

        Raises:
            Unreachable, DeadlineExceeded: whether it was committed is not known; the same step id again
                gives the same answer.
        """
        waiting = _waiting("steps", step, f"{WHAT} {step.step_id!r}", {"step_id": step.step_id})
        self._submit(waiting)
        told = self._told(waiting, monotonic() + self._options.commit_s)
        assert isinstance(told, StepResult)
        return told

    def ask(self, command: Streamed) -> Wire:
        """The reply to one command; raises its error.

        Raises:
            Unreachable, DeadlineExceeded: whether it was done is not known; the same request again gives
                the same answer.
        """
        (told,) = self.ask_many([command])
        if isinstance(told, ArrowTQError):
            raise told
        return told

    def ask_many(self, commands: Sequence[Streamed]) -> list[Wire | ArrowTQError]:
        """Each command's reply, or its error in the reply's place."""
        group = [_waiting(SECTIONS[type(command)], command, command.verb, {}) for command in commands]
        self._submit(*group)
        until = monotonic() + self._options.action_s
        return [self._outcome(one, until) for one in group]

    def _outcome(self, waiting: Waiting, until: float) -> Wire | ArrowTQError:
        try:
            return _body(waiting.what, self._told(waiting, until))
        except ArrowTQError as error:
            return error

    def _submit(self, *group: Waiting) -> None:
        with self._changed:
            self._wake()
            self._queue.extend(group)

    def _wake(self) -> None:
        """Under the lock: something is about to be there for the thread."""
        if self._closed:
            raise Conflict(f"{WHAT}: the connection to {self._connection.url} was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="arrow-tq-commits", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _told(self, waiting: Waiting, until: float) -> Told:
        told = waiting.wait(until)
        if told is None:
            raise DeadlineExceeded(f"{waiting.what}: no answer from {self._connection.url} in time")
        return told

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
            if not group:
                continue
            if channel is not None and channel.old:
                channel.close()
                channel = None
            began = monotonic()
            channel = self._exchange(channel, group)
            askers = {one.asker for one in group if isinstance(one, Waiting)}
            # Not held while nothing comes: what rode along views the files that it is in.
            del group
            self._gather(len(askers), monotonic() - began)
        if channel is not None:
            channel.close()

    def _gather(self, answered: int, took_s: float) -> None:
        """Let the threads that were answered ask what they ask next, so that it leaves together.

        Left to itself, half of them travel while the other half asks. One alone is not waited for.
        """
        until = monotonic() + min(GATHER_S, took_s * GATHER_SHARE)
        while 1 < answered > len(self._queue) and not self._finishing and monotonic() < until:
            sleep(GATHER_POLL_S)

    def _take(self) -> list[Waiting | Riding] | None:
        """What waits now; None once nothing came for a while, and this thread is no longer the one."""
        with self._changed:
            until = monotonic() + self._options.stream_idle_s
            while not self._queue and not self._leaving:
                left = until - monotonic()
                if left <= 0 or self._finishing or self._closed:
                    self._thread, self._finishing = None, False
                    return None
                self._changed.wait(left)
            leaving, self._leaving = self._leaving, False
            group: list[Waiting] = []
            size = 0
            while self._queue and len(group) < COMMANDS_A_MESSAGE_MAX and size < MESSAGE_BYTES_AIM:
                group.append(self._queue.popleft())
                size += len(group[-1].asked.raw)
        if self._cargo is None or not (leaving or any(one.asked.section == "steps" for one in group)):
            return [*group]
        # After the steps were taken: what they attach waits there, or left in an earlier message.
        return [*map(Riding, self._cargo.load()), *group]

    def _exchange(
        self, channel: CommitChannel | None, group: Sequence[Waiting | Riding]
    ) -> CommitChannel | None:
        """Send a group and hand out its results; returns the channel if it still works."""
        asked = [waiting.asked for waiting in group]
        try:
            channel, results = self._send(channel, asked)
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
        self, channel: CommitChannel | None, asked: Sequence[Asked]
    ) -> tuple[CommitChannel, list[Told]]:
        """One exchange, and once more on a new stream where the first did not get through."""
        try:
            channel = channel or CommitChannel(self._connection)
            return channel, channel.exchange(asked)
        except ArrowTQError as error:
            if not error.retryable:
                raise
        sleep(self._options.retry_pause_s)
        self._connection.renew()
        channel = CommitChannel(self._connection)
        return channel, channel.exchange(asked)


def _body(what: str, told: Told | None) -> Wire | ArrowTQError:
    """The reply that an answer holds, or its error."""
    assert isinstance(told, StreamAnswer)
    try:
        return told.body() or InternalError(f"{what}: an answer without a reply")
    except ArrowTQError as error:
        return error


def _waiting(section: Section, command: Wire, what: str, details: dict[str, object]) -> Waiting:
    try:
        return Waiting(Asked(section, command.model_dump_json().encode()), what)
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise InvalidInput(f"{what}: {error}", **details) from None
