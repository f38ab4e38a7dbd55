"""Headers: those that agents steer the proxy with, and those that are for one hop alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.names import check_id, check_session

Headers = list[tuple[bytes, bytes]]

SESSION = b"x-arrow-tq-session"
GROUP = b"x-arrow-tq-group"
STEP = b"x-arrow-tq-step"
PARENT = b"x-arrow-tq-parent"
RETRY_OF = b"x-arrow-tq-retry-of"
RECORDED = b"x-arrow-tq-recorded"
"""In answers: ``yes``, ``no``, or ``replayed``."""
RUN = b"x-arrow-tq-run"
START = b"x-arrow-tq-start"
"""To an engine with a recorder: the first position whose rows are wanted."""

OURS = frozenset([SESSION, GROUP, STEP, PARENT, RETRY_OF])
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
ATTEMPT = re.compile(r"(?P<name>.*)~(?P<number>[2-9]|[1-9]\d+)", re.DOTALL)
"""How a repeated call's further attempts are named."""


@dataclass(frozen=True, slots=True)
class CallNames:
    """What a call's headers say of its place."""

    session: str
    group: str | None
    step: str | None
    """The agent's own name for the call; it may be repeated."""
    parent: str | None
    """None: the session's last step. Empty: none, a tree of its own."""
    retry_of: str | None


def call_names(headers: Iterable[tuple[bytes, bytes]]) -> CallNames | None:
    """What the headers name; None where they name no session.

    Raises:
        InvalidInput: a name that cannot be one, or one given twice.
    """
    found: dict[bytes, str] = {}
    for name, value in headers:
        if name in OURS:
            if name in found:
                raise InvalidInput(f"header {name.decode()}: given twice")
            found[name] = _text(name, value)
    session = found.get(SESSION)
    if not session:
        return None
    check_session(session)
    parts = {name: found.get(name) or None for name in (GROUP, STEP, RETRY_OF)}
    for name, part in parts.items():
        if part is not None:
            check_id(part, f"header {name.decode()}")
    step = parts[STEP]
    if step is not None and ATTEMPT.fullmatch(step):
        raise InvalidInput(f"header {STEP.decode()}: {step!r}: a number after ~ is for the proxy's own use")
    parent = found.get(PARENT)
    if parent:
        check_id(parent, f"header {PARENT.decode()}")
    return CallNames(session, parts[GROUP], step, parent, parts[RETRY_OF])


def forwarded(headers: Iterable[tuple[bytes, bytes]], *leave_out: bytes) -> Headers:
    """The headers that go on to the other side, in their order."""
    headers = list(headers)
    named = {
        one.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for one in value.split(b",")
    }
    dropped = HOP_BY_HOP | named | set(leave_out)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _text(name: bytes, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(f"header {name.decode()}: expected UTF-8, got {value!r}") from None
