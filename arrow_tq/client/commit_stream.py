"""One commit stream: a message of steps out, its results in."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import pyarrow as pa
from pydantic import ValidationError

from arrow_tq.client.connection import Connection
from arrow_tq.client.failures import FLIGHT_FAILURES, translate
from arrow_tq_schemas.commands import StepResult, StepResults
from arrow_tq_schemas.errors import ArrowTQError, InternalError, Unreachable
from arrow_tq_schemas.tickets import CommitStream

WHAT = "step commit"


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

    def exchange(self, steps: Sequence[bytes]) -> list[StepResult]:
        """The results of steps, each given as its JSON.

        Raises:
            Unreachable, DeadlineExceeded: whether they were committed is not known.
            MalformedMessage: the server could not read one of them; none was committed.
        """
        message = b'{"steps":[' + b",".join(steps) + b"]}"
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
            results = StepResults.model_validate_json(raw.to_pybytes()).results
        except ValidationError as error:
            raise InternalError(f"{WHAT}: an answer that is none: {error.error_count()} errors") from None
        if len(results) != len(steps):
            raise InternalError(f"{WHAT}: {len(results)} results for {len(steps)} steps")
        return results

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
