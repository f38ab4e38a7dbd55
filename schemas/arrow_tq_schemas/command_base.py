"""What every command and reply is made of."""

from __future__ import annotations

import uuid
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field as Bound

from arrow_tq_schemas.chunks import Hex128

Seconds = Annotated[float, Bound(ge=0, le=10 * 365 * 86400)]


def new_request_id() -> str:
    """32 hex digits, never the same twice."""
    return uuid.uuid4().hex


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
