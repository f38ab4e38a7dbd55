"""The one place where an error becomes a Flight status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.flight as flight
import structlog

from arrow_tq_schemas.errors import (
    ArrowTQError,
    DeadlineExceeded,
    InternalError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from arrow_tq_server.metrics import Metrics

STATUS_CHARS_MAX = 300
MESSAGE_CHARS_MAX = 1500
DETAIL_ITEMS_MAX = 16
WIRE_BYTES_MAX = 4000
"""gRPC trailers of more than 8 KiB may be dropped with the whole status; these leave room for it all."""


def to_flight(error: ArrowTQError) -> flight.FlightError:
    """The Flight error for one of ours: status by kind, ``code: message``, and JSON details.

    Never ``FlightCancelledError``: it raises ``KeyboardInterrupt`` in a client's main thread.
    """
    kind: type[flight.FlightError] = flight.FlightServerError
    if isinstance(error, DeadlineExceeded):
        kind = flight.FlightTimedOutError
    elif isinstance(error, Unavailable):
        kind = flight.FlightUnavailableError
    elif isinstance(error, InternalError):
        kind = flight.FlightInternalError
    elif isinstance(error, Unauthenticated):
        kind = flight.FlightUnauthenticatedError
    elif isinstance(error, PermissionDenied):
        kind = flight.FlightUnauthorizedError
    return kind(f"{error.code}: {error.message[:STATUS_CHARS_MAX]}", extra_info=wire_bytes(error))


def wire_bytes(error: ArrowTQError) -> bytes:
    """``to_wire`` as JSON, cut to what fits gRPC's trailers."""
    wire = bounded_wire(error)
    raw = json.dumps(wire).encode()
    if len(raw) > WIRE_BYTES_MAX:
        # Escapes can triple the text: say less rather than lose the status.
        wire = {"code": error.code, "message": error.message[:STATUS_CHARS_MAX], "details": {}}
        raw = json.dumps(wire).encode()
    return raw


def bounded_wire(error: ArrowTQError) -> dict[str, object]:
    """``to_wire`` with long lists and texts cut; a cut detail says how many items it had."""
    details: dict[str, object] = {}
    for name, value in error.details.items():
        if isinstance(value, list | tuple) and len(value) > DETAIL_ITEMS_MAX:
            details[name] = list(value[:DETAIL_ITEMS_MAX])
            details[f"{name}_count"] = len(value)
        elif isinstance(value, str):
            details[name] = value[:MESSAGE_CHARS_MAX]
        elif value is None or isinstance(value, bool | int | float | list | tuple | dict):
            details[name] = value
        else:
            details[name] = str(value)[:MESSAGE_CHARS_MAX]
    return {"code": error.code, "message": error.message[:MESSAGE_CHARS_MAX], "details": details}


@contextmanager
def answering(verb: str, metrics: Metrics) -> Iterator[None]:
    """Every handler runs inside this: what leaves it is a Flight error without a traceback."""
    try:
        yield
    except ArrowTQError as error:
        metrics.errors.labels(error.code).inc()
        failure = to_flight(error)
    except GeneratorExit:
        raise
    except Exception as error:
        failure = to_flight(unforeseen(verb, error))
        metrics.errors.labels(InternalError.code).inc()
    else:
        return
    raise failure from None


def unforeseen(verb: str, error: Exception) -> InternalError:
    """Log a fault of our own; the client is told its kind and no more."""
    structlog.get_logger("arrow_tq.server").error("handler failed", verb=verb, exc_info=error)
    return InternalError(f"{verb}: {type(error).__name__} in the server; its log has the traceback")
