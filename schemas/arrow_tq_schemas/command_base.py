"""What every command and reply is made of."""

from __future__ import annotations

import os
import random
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field as Bound

from arrow_tq_schemas.chunks import Hex128

Seconds = Annotated[float, Bound(ge=0, le=10 * 365 * 86400)]


_random = random.Random()
"""Our own: who seeds Python's must not repeat our ids. Asking the kernel gives up the interpreter."""
os.register_at_fork(after_in_child=_random.seed)


def new_request_id() -> str:
    """32 hex digits, never the same twice."""
    return f"{_random.getrandbits(128):032x}"


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
