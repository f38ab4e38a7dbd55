"""``batch.ref``: what goes to every rank in place of the payload. JSON, well under 1 KB."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError

from arrow_tq_schemas.chunks import Hex128, explain
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage


class BatchRef(BaseModel):
    """Names a claim."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Annotated[int, Bound(ge=1, le=1)] = 1
    run: str
    task: str
    claim: Hex128

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def parse(cls, text: str, run: str) -> BatchRef:
        """Raises ``MalformedMessage`` for anything else, ``InvalidInput`` for another run's."""
        try:
            ref = cls.model_validate_json(text)
        except ValidationError as error:
            raise MalformedMessage(f"batch reference: {explain(error)}") from None
        if ref.run != run:
            raise InvalidInput(f"batch reference of run {ref.run!r}, this is run {run!r}")
        return ref
