"""Receipts: what a writer gets for rows that it stored, and what a step commits. JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError, model_validator

from arrow_tq_schemas.chunks import Count, Hex128, explain
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import Span


class StoredChunk(BaseModel):
    """A chunk that a shard acked."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Hex128
    """Chunk id of layer group 0; the groups present are 0 .. ``groups`` - 1."""
    start: Count
    rows: Annotated[int, Bound(ge=1, lt=1 << 31)]
    bytes: Count
    """Payload bytes of all layer groups together."""
    groups: Annotated[int, Bound(ge=1, le=256)] = 1
    valid: list[tuple[int, int]] | None = None
    """Runs of rows that are not null, half-open, ascending; None: every row."""

    @model_validator(mode="after")
    def _runs_ascend(self) -> StoredChunk:
        last = -1
        for first, end in self.valid or ():
            if not (last < first < end <= self.rows):
                raise ValueError(f"valid runs of {self.rows} rows must ascend and not touch: {self.valid}")
            last = end
        return self

    @property
    def chunk_id(self) -> ChunkId:
        return ChunkId.from_hex(self.id)

    def spans(self) -> list[Span]:
        """One span a run of rows that are not null."""
        runs = [(0, self.rows)] if self.valid is None else self.valid
        return [Span(self.start + first, self.chunk_id, first, end - first) for first, end in runs]


class Receipt(BaseModel):
    """Rows of one field that are stored and wait for a step to attach them.

    Null rows without a declared ``pad`` are holes: ``valid`` leaves them out, so that composing
    segments needs no payload to know what is covered.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Annotated[int, Bound(ge=1, le=1)] = 1
    run: str
    epoch: Count
    field: str
    start: Count
    """First position the put covered."""
    rows: Count
    """Rows it covered, null ones included. A put of zero rows has no chunk."""
    chunks: list[StoredChunk]

    @model_validator(mode="after")
    def _chunks_cover(self) -> Receipt:
        position = self.start
        for chunk in self.chunks:
            if chunk.start != position:
                raise ValueError(f"chunk {chunk.id} starts at {chunk.start}, expected {position}")
            position += chunk.rows
        if position != self.end:
            raise ValueError(f"chunks end at {position}, the receipt at {self.end}")
        return self

    @property
    def end(self) -> int:
        return self.start + self.rows

    def to_json(self) -> str:
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        """Raises ``MalformedMessage`` naming the key and the value that do not fit."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise MalformedMessage(f"receipt: {explain(error)}") from None

    def spans(self) -> list[Span]:
        return [span for chunk in self.chunks for span in chunk.spans()]


def chunk_ids(receipts: Iterable[Receipt]) -> list[ChunkId]:
    """Every chunk id in these receipts, all layer groups of each."""
    return [
        chunk.chunk_id.sibling(group)
        for receipt in receipts
        for chunk in receipt.chunks
        for group in range(chunk.groups)
    ]
