"""What a Flight call raised, as one of our errors. The Flight error itself is never kept: it pins memory."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.flight as flight

from arrow_tq_schemas.errors import (
    ArrowTQError,
    DeadlineExceeded,
    InternalError,
    Unreachable,
    error_types,
    from_wire,
)

FLIGHT_FAILURES = (flight.FlightError, pa.ArrowException, OSError)
"""Everything that pyarrow raises for a call that failed."""
TEXT_CHARS_MAX = 300
_BROKEN = ("unavailable", "socket closed", "connection reset", "broken pipe", "stream removed", "rst_stream")


def translate(error: BaseException, url: str, what: str, deadline_s: float) -> ArrowTQError:
    """The error that the server sent, or what became of the connection.

    Args:
        error: what pyarrow raised.
        url: the server's, for messages.
        what: the call, for messages.
        deadline_s: the deadline that the call had.
    """
    if isinstance(error, ArrowTQError):
        return error
    told = _from_server(error)
    if told is not None:
        return told
    text = _first_line(error)
    code, colon, message = text.partition(": ")
    if colon and code in error_types():
        # Some Flight calls lose the details of an error, and keep its text.
        return from_wire({"code": code, "message": message})
    if isinstance(error, flight.FlightTimedOutError):
        return DeadlineExceeded(
            f"{what}: {url} did not answer within {deadline_s:g} s", deadline_s=deadline_s
        )
    if isinstance(error, flight.FlightUnavailableError) or any(sign in text.lower() for sign in _BROKEN):
        return Unreachable(f"{what}: {url} cannot be reached: {text}", url=url)
    return InternalError(f"{what}: {url} failed: {text}", url=url)


def _from_server(error: BaseException) -> ArrowTQError | None:
    extra = getattr(error, "extra_info", None)
    if not extra:
        return None
    try:
        wire = json.loads(extra)
    except ValueError:
        return None
    return from_wire(wire) if isinstance(wire, dict) and "code" in wire else None


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0].removeprefix("Unknown error: ")
    for tail in (". Detail:", " Client context:", " gRPC client debug context:"):
        text = text.partition(tail)[0]
    return text[:TEXT_CHARS_MAX] or type(error).__name__
