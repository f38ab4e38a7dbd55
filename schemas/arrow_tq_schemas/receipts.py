"""Receipts: what a writer gets for rows that it stored, and what a step commits. JSON.

As text, chunks alike whose ids count up by one (``ids.IdSeries``) are one entry with a ``count``, so that
a receipt stays small however long the response was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field as Bound,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from arrow_tq_schemas.chunks import Count, Hex128, explain
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import Span
from arrow_tq_schemas.trusted import trusted

CHUNKS_MAX = 1 << 20
"""Chunks that one receipt may name."""


def _runs_ascend(runs: list[tuple[int, int]], info: ValidationInfo) -> list[tuple[int, int]]:
    last, rows = -1, info.data.get("rows", 0)
    for first, end in runs:
        if not (last < first < end <= rows):
            raise ValueError(f"valid runs of {rows} rows must ascend and not touch: {runs}")
        last = end
    return runs


class StoredChunk(BaseModel):
    """A chunk that a shard acked, or its first rows: what was trimmed is not part of the receipt."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Hex128
    """Chunk id of layer group 0; the groups present are 0 .. ``groups`` - 1."""
    start: Count
    rows: Annotated[int, Bound(ge=1, lt=1 << 31)]
    bytes: Count
    """Payload bytes of all layer groups together."""
    groups: Annotated[int, Bound(ge=1, le=256)] = 1
    # Checked with the list: a validator of the model is called for each of thousands of chunks without one.
    valid: Annotated[list[tuple[int, int]], AfterValidator(_runs_ascend)] | None = None
    """Runs of rows that are not null, half-open, ascending; None: every row."""

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
        """As text, chunks alike in one entry: a few hundred bytes unless null rows scatter."""
        if len(self.chunks) < 2:
            return self.model_dump_json(exclude_defaults=True)
        value = self.model_dump(mode="json", exclude_defaults=True, exclude={"chunks"})
        value["chunks"] = list(_counted(self.chunks))
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        """Raises ``MalformedMessage`` naming the key and the value that do not fit."""
        try:
            return cls.model_validate_json(_spelled_out(text))
        except ValidationError as error:
            raise MalformedMessage(f"receipt: {explain(error)}") from None

    def spans(self) -> list[Span]:
        return [span for chunk in self.chunks for span in chunk.spans()]


def stored_chunk(id: str, start: int, rows: int, bytes: int, groups: int) -> StoredChunk:
    """A ``StoredChunk`` without null rows, of values that its maker vouches for: validation costs more."""
    return trusted(
        StoredChunk,
        {"id": id, "start": start, "rows": rows, "bytes": bytes, "groups": groups, "valid": None},
    )


def trusted_receipt(
    run: str, epoch: int, field: str, start: int, rows: int, chunks: list[StoredChunk]
) -> Receipt:
    """A ``Receipt`` of values that its maker vouches for."""
    return trusted(
        Receipt,
        {"v": 1, "run": run, "epoch": epoch, "field": field, "start": start, "rows": rows, "chunks": chunks},
    )


def joined(receipts: Iterable[Receipt]) -> list[Receipt]:
    """The same rows in fewer receipts: those that begin where the one before of their field ends are one."""
    groups: list[list[Receipt]] = []
    last: dict[str, list[Receipt]] = {}
    for one in receipts:
        group = last.get(one.field)
        if group is None or one.start != group[-1].end or (one.run, one.epoch) != _writer(group[-1]):
            last[one.field] = group = []
            groups.append(group)
        group.append(one)
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _writer(receipt: Receipt) -> tuple[str, int]:
    return receipt.run, receipt.epoch


def _joined(group: Sequence[Receipt]) -> Receipt:
    first = group[0]
    chunks = [chunk for one in group for chunk in one.chunks]
    rows = group[-1].end - first.start
    return trusted_receipt(first.run, first.epoch, first.field, first.start, rows, chunks)


def _counted(chunks: Iterable[StoredChunk]) -> Iterator[dict[str, object]]:
    """JSON values of the chunks; each run of chunks alike is its first one with a ``count``."""
    first: StoredChunk | None = None
    count = 0
    for chunk in chunks:
        if first is not None and _continues(first, count, chunk):
            count += 1
            continue
        if first is not None:
            yield _entry(first, count)
        first, count = chunk, 1
    if first is not None:
        yield _entry(first, count)


def _continues(first: StoredChunk, count: int, chunk: StoredChunk) -> bool:
    return (
        first.valid is None
        and chunk.valid is None
        and (chunk.rows, chunk.bytes, chunk.groups) == (first.rows, first.bytes, first.groups)
        and chunk.chunk_id.value == first.chunk_id.value + count
    )


def _entry(first: StoredChunk, count: int) -> dict[str, object]:
    value: dict[str, object] = first.model_dump(mode="json", exclude_defaults=True)
    return value if count == 1 else {**value, "count": count}


def _spelled_out(text: str | bytes) -> str | bytes:
    """The same receipt with one entry a chunk."""
    if '"count"' not in (text.decode("utf-8", "replace") if isinstance(text, bytes) else text):
        return text
    try:
        value = json.loads(text)
        chunks = value["chunks"]
        # The absolute value: a negative count must not make room for another.
        if sum(abs(entry.get("count", 1)) for entry in chunks) > CHUNKS_MAX:
            raise MalformedMessage(f"receipt: more than {CHUNKS_MAX} chunks")
        value["chunks"] = [one for entry in chunks for one in _spell_out(entry)]
    except MalformedMessage:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedMessage(f"receipt: {type(error).__name__}: {error}") from None
    return json.dumps(value)


def _spell_out(entry: dict[str, object]) -> Iterator[dict[str, object]]:
    count = entry.pop("count", 1)
    if count == 1:
        yield entry
        return
    first, start, rows = ChunkId.from_hex(str(entry["id"])), entry["start"], entry["rows"]
    if not (type(count) is type(start) is type(rows) is int and count > 1 and entry.get("valid") is None):
        raise MalformedMessage(f"receipt: a chunk with count {count!r}: expected equal chunks without nulls")
    for number in range(count):
        yield {**entry, "id": ChunkId(first.value + number).hex, "start": start + number * rows}


def chunk_ids(receipts: Iterable[Receipt]) -> list[ChunkId]:
    """Every chunk id in these receipts, all layer groups of each."""
    return [
        chunk.chunk_id.sibling(group)
        for receipt in receipts
        for chunk in receipt.chunks
        for group in range(chunk.groups)
    ]
