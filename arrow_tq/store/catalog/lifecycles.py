"""Sessions opened and finalized, many in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import apsw

from arrow_tq.store.catalog.database import Readers
from arrow_tq.store.catalog.finalize import compose_session, store_segments
from arrow_tq.store.catalog.operations import Operations
from arrow_tq.store.catalog.requests import once
from arrow_tq.store.catalog.runs import CommittedRuns, WriterRuns
from arrow_tq.store.catalog.writer import Again, Apply, Beside, Writer
from arrow_tq_schemas.commands import FinalizeSession, OpenSession, Wire
from arrow_tq_schemas.errors import ArrowTQError, Busy, InvalidInput
from arrow_tq_schemas.ids import ChunkId

FINALIZE_TRIES_MAX = 20
"""Times that a session is composed again because a step was committed meanwhile."""
Lifecycle = OpenSession | FinalizeSession


@dataclass(slots=True, eq=False)
class Begun:
    """Commands on their way."""

    commands: Sequence[Lifecycle]
    outcomes: list[Wire | ArrowTQError | None]
    """One a command, None as long as it is not known."""
    prepared: Sequence[int]
    """Which commands the operations are of."""
    beside: Beside[Wire]


class Lifecycles:
    """Answers the commands that open and finalize sessions."""

    def __init__(
        self,
        readers: Readers,
        writer: Writer,
        runs: CommittedRuns,
        writer_runs: WriterRuns,
        operations: Operations,
        on_released: Callable[[list[ChunkId]], None],
    ) -> None:
        self._readers = readers
        self._writer = writer
        self._runs = runs
        self._writer_runs = writer_runs
        self._operations = operations
        self._on_released = on_released

    def execute_many(self, commands: Sequence[Lifecycle]) -> list[Wire | ArrowTQError]:
        """Each command's reply, or its error in the reply's place; each is atomic by itself."""
        return self.finish(self.begin(commands))

    def begin(self, commands: Sequence[Lifecycle]) -> Begun:
        """Have everything ready for the writer; ``finish`` has it run, unless a commit took it along."""
        return self._begin(commands, range(len(commands)), [None] * len(commands))

    def finish(self, begun: Begun) -> list[Wire | ArrowTQError]:
        """As ``execute_many``."""
        waiting = self._settle(begun)
        for _ in range(FINALIZE_TRIES_MAX - 1):
            if not waiting:
                break
            waiting = self._settle(self._begin(begun.commands, waiting, begun.outcomes))
        for index in waiting:
            begun.outcomes[index] = Busy(
                f"session {begun.commands[index].session_id!r}: steps were committed while it was finalized"
            )
        return [outcome for outcome in begun.outcomes if outcome is not None]

    def execute(self, command: Lifecycle) -> Wire:
        """The reply; raises the error."""
        (outcome,) = self.execute_many([command])
        if isinstance(outcome, ArrowTQError):
            raise outcome
        return outcome

    def _begin(
        self, commands: Sequence[Lifecycle], chosen: Sequence[int], outcomes: list[Wire | ArrowTQError | None]
    ) -> Begun:
        """What those chosen do in the writer; ``outcomes`` has why some cannot."""
        prepared: list[int] = []
        applies: list[Apply[Wire]] = []
        with self._snapshot([commands[index] for index in chosen]) as connection:
            for index in chosen:
                try:
                    applies.append(self._prepare(commands[index], connection))
                    prepared.append(index)
                except ArrowTQError as error:
                    outcomes[index] = error
        return Begun(commands, outcomes, prepared, Beside(applies))

    def _settle(self, begun: Begun) -> list[int]:
        """Fill in outcomes, and say whose session went on meanwhile."""
        beside = begun.beside
        if beside.outcomes is None:
            beside.outcomes = self._writer.run(beside.applies) if beside.applies else []
        again: list[int] = []
        released: list[ChunkId] = []
        for index, outcome in zip(begun.prepared, beside.outcomes, strict=True):
            if isinstance(outcome.error, Again):
                again.append(index)
                continue
            begun.outcomes[index] = outcome.value if outcome.error is None else outcome.error
            released += outcome.released
        if released:
            self._on_released(released)
        return again

    def _snapshot(self, commands: Sequence[Lifecycle]) -> AbstractContextManager[apsw.Connection | None]:
        """One for all that is to be composed; none where nothing is."""
        composes = any(isinstance(command, FinalizeSession) for command in commands)
        return self._readers.snapshot() if composes else nullcontext()

    def _prepare(self, command: Lifecycle, connection: apsw.Connection | None) -> Apply[Wire]:
        if isinstance(command, OpenSession):
            return once(command, self._operations.operation(command))
        run = self._runs.get(command.run)
        assert connection is not None
        try:
            composed = compose_session(connection, run, command)
        except UnicodeEncodeError as error:
            raise InvalidInput(f"{command.verb}: text with a lone surrogate at {error.start}") from None
        return once(command, store_segments(composed, self._writer_runs, command))
