"""One commit stream: a message of steps and of sessions' commands out, its answers in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import pyarrow as pa
from pydantic import ValidationError

from arrow_tq.client.connection import Connection
from arrow_tq.client.failures import FLIGHT_FAILURES, translate
from arrow_tq_schemas.commands import StepResult, StreamAnswer, StreamAnswers
from arrow_tq_schemas.errors import ArrowTQError, InternalError, Unreachable
from arrow_tq_schemas.tickets import CommitStream

WHAT = "step commit"


Section = Literal["adopts", "opens", "steps", "finalizes"]
BESIDE: tuple[Section, ...] = ("adopts", "opens", "finalizes")
"""Sections beside steps, in the order of their answers."""
Told = StepResult | StreamAnswer


@dataclass(frozen=True, slots=True)
class Asked:
    """One command: where in a ``StreamMessage`` it goes, and its JSON."""

    section: Section
    raw: bytes


class CommitChannel:
    """A stream that is asked and answered in turn, by one thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._until = monotonic() + connection.options.stream_life_s
        self._deadline_s = 2 * connection.options.stream_life_s
        descriptor = CommitStream().model_dump_json().encode()
        self._writer, self._reader = connection.put(descriptor, pa.schema([]), self._deadline_s, WHAT)

    @property
    def old(self) -> bool:
        """Whether its deadline comes near: another one should be opened."""
        return monotonic() >= self._until

    def exchange(self, asked: Sequence[Asked]) -> list[Told]:
        """What commands get, each in its place.

        Raises:
            Unreachable, DeadlineExceeded: whether they were done is not known.
            MalformedMessage: the server could not read one of them; none was done.
        """
        message = _message(asked)
        raw = None
        failure: ArrowTQError | None = None
        try:
            self._writer.write_metadata(pa.py_buffer(message))
            raw = self._reader.read()
        except FLIGHT_FAILURES as error:
            failure = self._translated(error)
        if raw is None:
            raise self._ending(failure) from None
        try:
            answers = StreamAnswers.model_validate_json(raw.to_pybytes())
        except ValidationError as error:
            raise InternalError(f"{WHAT}: an answer that is none: {error.error_count()} errors") from None
        told = len(answers.results) + len(answers.answers)
        if told != len(asked) or len(answers.results) != sum(one.section == "steps" for one in asked):
            raise InternalError(f"{WHAT}: {told} answers for {len(asked)} commands")
        return _in_place(asked, answers)

    def close(self) -> None:
        """End the stream. Everything sent here was answered: how it ends changes nothing."""
        try:
            self._writer.done_writing()
            while self._reader.read() is not None:
                continue
            self._writer.close()
        except FLIGHT_FAILURES:
            return

    def _ending(self, failure: ArrowTQError | None) -> ArrowTQError:
        """Why the stream ended. The server's own words may only come out when it is closed."""
        try:
            self._writer.close()
        except FLIGHT_FAILURES as error:
            told = self._translated(error)
            if failure is None or isinstance(failure, InternalError | Unreachable):
                return told
        return failure or Unreachable(f"{WHAT}: {self._connection.url} ended the stream")

    def _translated(self, error: BaseException) -> ArrowTQError:
        return translate(error, self._connection.url, WHAT, self._deadline_s)


def _message(asked: Sequence[Asked]) -> bytes:
    """A ``StreamMessage``; one of steps alone has nothing else in it."""
    sections: dict[str, list[bytes]] = {}
    for one in asked:
        sections.setdefault(one.section, []).append(one.raw)
    parts = [b'"%s":[%s]' % (name.encode(), b",".join(raws)) for name, raws in sections.items()]
    return b"{" + b",".join(parts) + b"}"


def _in_place(asked: Sequence[Asked], answers: StreamAnswers) -> list[Told]:
    """Answers come section by section."""
    beside = iter(answers.answers)
    by_section: dict[Section, list[Told]] = {"steps": list(answers.results)}
    for section in BESIDE:
        by_section[section] = [next(beside) for one in asked if one.section == section]
    waiting = {section: iter(told) for section, told in by_section.items()}
    return [next(waiting[one.section]) for one in asked]
