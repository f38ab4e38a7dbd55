"""Answers of calls that were recorded, kept for agents that repeat a call because its answer was lost."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from arrow_tq.proxy.headers import Headers

Key = tuple[str, str]
"""Session, and the agent's name of the call."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as the agent got it."""

    headers: Headers
    body: bytes


class Replies:
    """The answers that were used last, within a bound of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._replies: OrderedDict[Key, Reply] = OrderedDict()
        self.nbytes = 0

    def get(self, session: str, name: str | None) -> Reply | None:
        return None if name is None else self._replies.get((session, name))

    def keep(self, session: str, name: str | None, reply: Reply) -> None:
        """Keep an answer; those kept longest make room."""
        if name is None or len(reply.body) > self._bytes_max:
            return
        self.forget(session, name)
        self._replies[session, name] = reply
        self.nbytes += len(reply.body)
        while self.nbytes > self._bytes_max:
            _, gone = self._replies.popitem(last=False)
            self.nbytes -= len(gone.body)

    def forget(self, session: str, name: str) -> None:
        gone = self._replies.pop((session, name), None)
        if gone is not None:
            self.nbytes -= len(gone.body)

    def forget_session(self, session: str, names: list[str]) -> None:
        """Forget the answers of a session's calls."""
        for name in names:
            self.forget(session, name)
