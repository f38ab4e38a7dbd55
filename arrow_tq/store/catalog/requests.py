"""Replies by run and request id, kept in the transaction of their change: a retried call applies once.

The run is part of the key: a request id of another run finds nothing, so that who may see one run only
cannot ask for the replies of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import apsw

from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.commands import REPLIES, Mutation, Wire
from arrow_tq_schemas.errors import Conflict

PRUNED_MAX = 20_000
"""Replies deleted in one transaction at most, so that commits behind it do not wait long."""


def once(command: Mutation, apply: Callable[[Change], Wire]) -> Callable[[Change], Wire]:
    """``apply``, unless this request was answered before: then its reply."""

    def answer(change: Change) -> Wire:
        key = _key(command)
        known = _find(change.connection, command, key)
        if known is not None:
            return known
        reply = apply(change)
        change.execute(
            "INSERT INTO requests VALUES (?, ?, ?, ?)",
            (key, command.verb, reply.model_dump_json(), change.now_us),
        )
        return reply

    return answer


def answered(connection: apsw.Connection, command: Mutation) -> Wire | None:
    """The reply to this request id, or None.

    Raises:
        Conflict: the id was used for another command.
    """
    return _find(connection, command, _key(command))


def _find(connection: apsw.Connection, command: Mutation, key: bytes) -> Wire | None:
    known: Any = connection.execute(
        "SELECT verb, body FROM requests WHERE request_id IN (?, ?)", (key, _older_key(command))
    ).fetchone()
    if known is None:
        return None
    verb, body = known
    if verb != command.verb:
        raise Conflict(f"request id {command.request_id} was used for {verb}, now for {command.verb}")
    return REPLIES[type(command)].model_validate_json(body)


def prune(change: Change, ttl_s: float) -> int:
    """Forget replies older than that, and empty claims that ended before; says how many replies."""
    before = change.now_us - int(ttl_s * 1e6)
    change.execute(
        "DELETE FROM requests WHERE request_id IN "
        "(SELECT request_id FROM requests WHERE created_at < ? ORDER BY created_at LIMIT ?)",
        (before, PRUNED_MAX),
    )
    count = change.connection.changes()
    change.execute(
        "DELETE FROM claims WHERE segments = 0 AND state <> 'active' AND expires_at < ?", (before,)
    )
    return count


def _key(command: Mutation) -> bytes:
    """The id first: a client's ids count up, and its replies share pages, which a hash spreads over all."""
    return bytes.fromhex(command.request_id) + hashlib.blake2b(_scope(command), digest_size=8).digest()


def _older_key(command: Mutation) -> bytes:
    """As earlier versions stored it: a request may be asked again of a newer one."""
    name = command.request_id.encode() + b":" + _scope(command)
    return hashlib.blake2b(name, digest_size=16).digest()


def _scope(command: Mutation) -> bytes:
    return str(getattr(command, "run", None) or "").encode()
