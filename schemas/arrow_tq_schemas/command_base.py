"""What every command and reply is made of."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field as Bound

from arrow_tq_schemas.chunks import Hex128

Seconds = Annotated[float, Bound(ge=0, le=10 * 365 * 86400)]


class _RequestIds:
    """Ids that count up: what a process asks for lies together in a catalog's table of replies."""

    def __init__(self) -> None:
        self._series, self._numbers = _series()

    def begin_again(self) -> None:
        """In a forked child: its parent goes on with the series that there was."""
        self._series, self._numbers = _series()

    def next(self) -> str:
        return f"{self._series}{next(self._numbers):016x}"


def _series() -> tuple[str, Iterator[int]]:
    """From the kernel: who seeds Python's generator must not repeat our ids."""
    return os.urandom(8).hex(), itertools.count(int.from_bytes(os.urandom(7), "big"))


_request_ids = _RequestIds()
os.register_at_fork(after_in_child=_request_ids.begin_again)


def new_request_id() -> str:
    """32 hex digits, never the same twice."""
    return _request_ids.next()


class Wire(BaseModel):
    """What travels: frozen, JSON, unknown keys refused."""

    # Without this a NaN would travel as null, and arrive as None.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Command(Wire):
    """Base of all commands."""

    verb: ClassVar[str]
    mutates: ClassVar[bool] = False


class Mutation(Command):
    """A command that changes the store."""

    mutates: ClassVar[bool] = True
    request_id: Hex128 = Bound(default_factory=new_request_id)
