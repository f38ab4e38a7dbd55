"""Who calls, and what they may see: every call passes here before anything of it is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.flight as flight

from arrow_tq_schemas.access import EVERYTHING, Grant, Need
from arrow_tq_schemas.errors import NotFound, Unauthenticated
from arrow_tq_server.served import ServedEngine
from arrow_tq_server.tokens import Tokens

NAME = "arrow-tq"
"""Of the middleware, to find it by."""
BEARER = "bearer "
STORE_GAUGES = frozenset({"capacity_bytes", "used_bytes", "room_waiters"})
"""Statistics of the whole store that any token sees: producers of every run share its room."""


class Guard:
    """Turns a call's ``Authorization`` header into what its token allows; without tokens, everything."""

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked for a token."""
        return self._tokens is None

    def grant(self, header: str | None) -> Grant:
        """Raises ``Unauthenticated`` without a bearer token that is known."""
        if self._tokens is None:
            return EVERYTHING
        if header is None or header[: len(BEARER)].lower() != BEARER:
            raise Unauthenticated("this server needs a token: 'Authorization: Bearer TOKEN' (token=...)")
        return self._tokens.grant(header[len(BEARER) :].strip())

    def look_again(self) -> None:
        """Read the tokens anew at the next call."""
        if self._tokens is not None:
            self._tokens.look_again()


class NoHandshake(flight.ServerAuthHandler):  # type: ignore[misc]
    """Flight's own handshake is not used; a server without a handler would refuse clients that try it."""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        """Nothing: the header of each call is what counts."""

    def is_valid(self, token: bytes) -> str:
        """Nobody in particular."""
        return ""


class Caller(flight.ServerMiddleware):  # type: ignore[misc]
    """Of one call: its token's grant, or why there is none."""

    def __init__(self, grant: Grant | Unauthenticated) -> None:
        super().__init__()
        self._grant = grant

    def grant(self) -> Grant:
        """Raises ``Unauthenticated``: here and not before, where Flight would lose its details."""
        if isinstance(self._grant, Unauthenticated):
            raise self._grant
        return self._grant


class Callers(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Looks at the headers of every call."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str | bytes]]) -> Caller:
        """The caller of one call."""
        try:
            return Caller(self._guard.grant(_authorization(headers)))
        except Unauthenticated as error:
            return Caller(error)


def grant_of(context: flight.ServerCallContext) -> Grant:
    """What the caller may do; raises ``Unauthenticated``."""
    caller = context.get_middleware(NAME)
    if not isinstance(caller, Caller):
        raise Unauthenticated("a call that nobody looked at")
    return caller.grant()


def permit(engine: ServedEngine, grant: Grant, wanted: Need, what: str) -> None:
    """Let a call pass, or not.

    Raises:
        PermissionDenied: the token does not cover it.
        NotFound: there is no such run; to a token of some runs this never names the runs that there are.
    """
    grant.check(wanted, what)
    if grant.runs is not None:
        for run in wanted.runs or ():
            if not engine.has_run(run):
                raise NotFound(f"run {run!r} does not exist", run=run)


def shown_stats(values: Mapping[str, float], grant: Grant) -> dict[str, float]:
    """Of statistics by name: those that a token of some runs may see, which are its runs' own."""
    if grant.runs is None:
        return dict(values)
    labels = tuple(f'run="{run}"' for run in grant.runs)
    return {
        name: value
        for name, value in values.items()
        if name in STORE_GAUGES or name.partition("{")[2].rstrip("}").startswith(labels)
    }


def _authorization(headers: Mapping[str, Sequence[str | bytes]]) -> str | None:
    for name, values in headers.items():
        if name.lower() == "authorization" and len(values) == 1:
            value = values[0]
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None
