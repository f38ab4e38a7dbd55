"""What goes wrong with a call, and the HTTP answer that says so."""

from __future__ import annotations

import json

from arrow_tq_schemas.errors import (
    ArrowTQError,
    Conflict,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NotFound,
    Unavailable,
    Unsupported,
)


class EngineFailure(Exception):
    """The engine cannot be reached, was silent for too long, or answered what cannot be recorded."""

    def __init__(self, status: int, error: ArrowTQError) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error


class StoreFailure(Exception):
    """The store could not record a call, through no fault of the call."""

    def __init__(self, error: ArrowTQError) -> None:
        super().__init__(error.message)
        self.error = error


class TooLarge(Exception):
    """A body past its bound."""

    def __init__(self, error: InvalidInput) -> None:
        super().__init__(error.message)
        self.error = error


class AgentGone(Exception):
    """The agent closed its connection: nobody waits for an answer."""


def is_store_failure(error: ArrowTQError) -> bool:
    """Whether the same call might be recorded another time."""
    return isinstance(error, Unavailable | DeadlineExceeded | InternalError)


def status_of(error: ArrowTQError) -> int:
    """HTTP status of an error that the store, or a header, caused."""
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Conflict):
        return 409
    if isinstance(error, InvalidInput):
        return 400
    if isinstance(error, Unsupported):
        return 501
    return 503 if is_store_failure(error) else 500


def error_body(error: ArrowTQError) -> bytes:
    """The JSON that tells an error, in the shape that OpenAI's clients know."""
    body = {
        "type": "arrow_tq",
        "code": error.code,
        "message": error.message,
        "param": None,
        "retryable": error.retryable,
        "details": error.details,
    }
    return json.dumps({"error": body}, default=str).encode("ascii")
