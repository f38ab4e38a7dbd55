"""Every error that arrow-tq raises, each with a code that never changes.

::

    ArrowTQError
    ├── InvalidInput (ValueError)            invalid-input
    │   ├── InvalidField                     invalid-field
    │   ├── ValueOutOfRange                  value-out-of-range
    │   ├── RowCountMismatch                 row-count-mismatch
    │   ├── InvalidQuery                     invalid-query
    │   ├── LimitTooSmall                    limit-too-small
    │   ├── MalformedMessage                 malformed-message
    │   ├── Hole                             hole
    │   └── Misaligned                       misaligned
    ├── NotFound (KeyError)                  not-found
    │   ├── ChunkReleased                    chunk-released
    │   └── ChunkLost                        chunk-lost
    ├── Conflict                             conflict
    │   ├── StaleEpoch                       stale-epoch
    │   ├── SessionClosed                    session-closed
    │   ├── ClaimGone                        claim-gone
    │   ├── MarkSpent                        mark-spent
    │   └── StoreInUse                       store-in-use
    ├── Unavailable                          unavailable        (retryable)
    │   ├── StoreFull                        store-full         (retryable)
    │   │   └── QuotaExceeded                quota-exceeded     (retryable)
    │   ├── Busy                             busy               (retryable)
    │   └── Unreachable                      unreachable        (retryable)
    ├── DeadlineExceeded (TimeoutError)      deadline-exceeded  (retryable)
    │   ├── ChunkPending                     chunk-pending      (retryable)
    │   └── QueryKilled                      query-killed
    ├── Unauthenticated                      unauthenticated
    ├── PermissionDenied                     permission-denied
    ├── Unsupported                          unsupported
    └── InternalError                        internal
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class ArrowTQError(Exception):
    """Base of every arrow-tq error.

    Attributes:
        code: stable machine-readable name, the same in process and over the wire.
        retryable: whether the same call may succeed later, unchanged.
        message: one sentence that names what, where and what was expected.
        details: JSON-safe values behind the message (ids, positions, counts).
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, object] = details

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self).code, self.message, self.details))

    def to_wire(self) -> dict[str, object]:
        """The JSON-safe form that travels as Flight error details."""
        return {"code": self.code, "message": self.message, "details": self.details}


class InvalidInput(ArrowTQError, ValueError):
    """The caller passed something that can never work."""

    code = "invalid-input"


class InvalidField(InvalidInput):
    """A field declaration, or an array's dtype or shape against its field."""

    code = "invalid-field"


class ValueOutOfRange(InvalidInput):
    """A value does not fit its field; names field, value and position."""

    code = "value-out-of-range"


class RowCountMismatch(InvalidInput):
    """Two row counts that must agree do not; both are named."""

    code = "row-count-mismatch"


class InvalidQuery(InvalidInput):
    """A ``where`` predicate or SQL statement that is refused or does not parse."""

    code = "invalid-query"


class LimitTooSmall(InvalidInput):
    """One unit of a claim holds more segments than ``limit`` allows."""

    code = "limit-too-small"


class MalformedMessage(InvalidInput):
    """Bytes from the network or a file that do not follow the contract."""

    code = "malformed-message"


class Hole(InvalidInput):
    """Positions inside a field's domain that no step wrote; names field, segment, positions."""

    code = "hole"


class Misaligned(InvalidInput):
    """Stored token ids differ from those the caller expected; names the first position."""

    code = "misaligned"


class NotFound(ArrowTQError, KeyError):
    """A run, session, segment, claim or chunk that does not exist."""

    code = "not-found"


class ChunkReleased(NotFound):
    """The chunk was released or discarded: its tombstone remains, its bytes do not."""

    code = "chunk-released"


class ChunkLost(NotFound):
    """The chunk should be readable and is not (gone or corrupt)."""

    code = "chunk-lost"


class Conflict(ArrowTQError):
    """The call contradicts what is stored."""

    code = "conflict"


class StaleEpoch(Conflict):
    """A writer of an older epoch of the run."""

    code = "stale-epoch"


class SessionClosed(Conflict):
    """The session is finalized, aborted or discarded already."""

    code = "session-closed"


class ClaimGone(Conflict):
    """The claim's lease expired, or it was released."""

    code = "claim-gone"


class MarkSpent(Conflict):
    """What was released since the mark is not kept any more; names why, and the marks that are left."""

    code = "mark-spent"


class StoreInUse(Conflict):
    """Another process owns the directory; names its process id and URL."""

    code = "store-in-use"


class Unavailable(ArrowTQError):
    """Temporarily not possible."""

    code = "unavailable"
    retryable = True


class StoreFull(Unavailable):
    """No room for the write; names used and capacity bytes."""

    code = "store-full"


class QuotaExceeded(StoreFull):
    """A run's own share of the store is full, others have theirs; names the run, used and quota bytes."""

    code = "quota-exceeded"


class Busy(Unavailable):
    """A bound on concurrent work was reached; names the setting."""

    code = "busy"


class Unreachable(Unavailable):
    """The server did not answer; names its URL."""

    code = "unreachable"


class DeadlineExceeded(ArrowTQError, TimeoutError):
    """The call's own deadline passed; names it."""

    code = "deadline-exceeded"
    retryable = True


class ChunkPending(DeadlineExceeded):
    """The chunk's step was still open when the wait ended; names the ids."""

    code = "chunk-pending"


class QueryKilled(DeadlineExceeded):
    """A SQL query passed its time or memory bound and was stopped."""

    code = "query-killed"
    retryable = False


class Unauthenticated(ArrowTQError):
    """The server takes known tokens only, and the call came without one that it knows."""

    code = "unauthenticated"


class PermissionDenied(ArrowTQError):
    """The caller's token does not cover this; names the right and the run that it would need."""

    code = "permission-denied"


class Unsupported(ArrowTQError):
    """A declared name whose behaviour this version does not have."""

    code = "unsupported"


class InternalError(ArrowTQError):
    """A fault of arrow-tq itself; the log of the process has the traceback."""

    code = "internal"


def error_types() -> dict[str, type[ArrowTQError]]:
    """Every error class by its code."""
    found: dict[str, type[ArrowTQError]] = {}
    waiting: list[type[ArrowTQError]] = [ArrowTQError]
    while waiting:
        kind = waiting.pop()
        found[kind.code] = kind
        waiting.extend(kind.__subclasses__())
    return found


def from_wire(wire: Mapping[str, object]) -> ArrowTQError:
    """The error that ``to_wire`` described; an unknown code becomes ``InternalError``."""
    details = wire.get("details")
    kind = error_types().get(str(wire.get("code")), InternalError)
    return kind(str(wire.get("message", "")), **(details if isinstance(details, dict) else {}))


def _rebuild(code: str, message: str, details: dict[str, object]) -> ArrowTQError:
    return from_wire({"code": code, "message": message, "details": details})
