"""Finds out whether the server runs on this machine, and in memory that this process may read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TypeVar

from arrow_tq.client.connection import Connection
from arrow_tq_schemas.commands import (
    Command,
    FindHost,
    HostInfo,
    Reply,
    Wire,
    unpack_reply,
)
from arrow_tq_schemas.errors import ArrowTQError, DeadlineExceeded, InternalError, NotFound, Unavailable

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROOF_CHARS = 32
SOON_S = 3.0
"""Deadline of what only saves time: a server that does not answer so soon is spoken to by the wire."""
Body = TypeVar("Body", bound=Wire)


class Host:
    """One server, seen from this process. Thread-safe; asks once, and again after ``forget``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._asked = False
        self._proof: str | None = None

    def proof(self) -> str | None:
        """What the server wrote for clients of this machine; None where this is another one."""
        if not self._asked:
            with self._lock:
                if not self._asked:
                    # In this order: who sees that it was asked also sees the answer.
                    known, self._proof = self._look()
                    self._asked = known
        return self._proof

    @property
    def known_proof(self) -> str | None:
        """As ``proof``, without asking: None also where nobody has asked since ``forget``."""
        return self._proof

    def forget(self, proof: str) -> None:
        """The server knows this proof no more: it is another process. The next call asks anew."""
        with self._lock:
            if self._proof == proof:
                self._asked, self._proof = False, None

    def forget_stale(self, error: BaseException, proof: str) -> bool:
        """Forget a proof that was refused; whether it was that."""
        stale = isinstance(error, ArrowTQError) and is_stale(error)
        if stale:
            self.forget(proof)
        return stale

    def ask(self, command: Command, kind: type[Body], deadline_s: float | None = None) -> tuple[Body, Reply]:
        """The reply to a command, within ``deadline_s`` if that is given; raises its error."""
        connection = self._connection
        raw = command.model_dump_json().encode()
        deadline_s = min(deadline_s or connection.options.action_s, connection.options.action_s)
        answer = connection.retrying(lambda: connection.action(command.verb, raw, deadline_s))
        reply = unpack_reply(command, answer)
        if not isinstance(reply.body, kind):
            raise InternalError(f"reply to {command.verb}: {type(reply.body).__name__}")
        return reply.body, reply

    def _look(self) -> tuple[bool, str | None]:
        """Whether that is known now, and the proof."""
        if not self._connection.options.same_host or not BOOT_ID.exists():
            return True, None
        try:
            info, _ = self.ask(FindHost(), HostInfo, SOON_S)
        except (Unavailable, DeadlineExceeded):
            # The wire says so better, by the call that matters.
            return False, None
        except ArrowTQError:
            # A server that knows no such command, or is none of ours.
            return True, None
        return True, _read(info)


def _read(info: HostInfo) -> str | None:
    """The proof, where the machine is the same and this user may read what the server's wrote."""
    try:
        if info.boot_id != BOOT_ID.read_text().strip():
            return None
        with Path(info.proof_path).open("rb") as file:
            proof = file.read(PROOF_CHARS + 1).decode("ascii")
    except (OSError, ValueError):
        return None
    return proof if len(proof) == PROOF_CHARS else None


def is_stale(error: ArrowTQError) -> bool:
    """Whether a proof was refused."""
    return isinstance(error, NotFound) and error.details.get("what") == "host_proof"
