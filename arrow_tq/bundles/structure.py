"""What a bundle's bytes are: its fields in order, the layout of each, and where every block lies.

Stored as the bundle's chunk 0, as JSON::

    {"v": 1, "rows": N, "chunks": [bytes, ...], "fields": [
        {"key": "tokens", "layout": "arrays", "count": N, "per_row": true, "meta": {...},
         "buffers": {"values": [[chunk, offset, bytes, rows], ...], ...}}, ...]}

``chunks[i]`` is the size of chunk i + 1. A block is part of one chunk and holds whole rows; where a row is
larger than a block may be, the blocks after its first have 0 rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from arrow_tq_schemas.errors import MalformedMessage

VERSION = 1
ROW_BUFFERS = ("values", "attached")
"""Buffers whose blocks hold rows, so that those of wanted rows can be read alone."""
ROWS_MAX = 1 << 27
"""Of one field: a list of as many pointers is made for it, whatever it holds."""
LAYOUTS = ("arrays", "lists", "scalars", "strings", "array", "objects", "msgpack")


class Block(NamedTuple):
    """Consecutive rows of one buffer, or a part of one row."""

    chunk: int
    offset: int
    nbytes: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class FieldLayout:
    """One field as it is stored.

    Attributes:
        key: the field's name, in the tagged encoding of ``objects``.
        layout: one of ``LAYOUTS``.
        count: how many rows it has; 1 where it is no sequence.
        per_row: whether its rows are the bundle's samples.
        meta: what the layout needs to know: dtype, shape, container.
        buffers: blocks by buffer name, in row order.
    """

    key: object
    layout: str
    count: int
    per_row: bool
    meta: Mapping[str, object]
    buffers: Mapping[str, Sequence[Block]]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """All of a bundle but its values."""

    rows: int
    chunks: Sequence[int]
    fields: Sequence[FieldLayout]

    @property
    def nbytes(self) -> int:
        return sum(self.chunks)

    def to_bytes(self) -> bytes:
        fields = [
            {
                "key": one.key,
                "layout": one.layout,
                "count": one.count,
                "per_row": one.per_row,
                "meta": one.meta,
                "buffers": one.buffers,
            }
            for one in self.fields
        ]
        whole = {"v": VERSION, "rows": self.rows, "chunks": list(self.chunks), "fields": fields}
        return json.dumps(whole, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Structure:
        """Raises ``MalformedMessage`` for what ``to_bytes`` did not make."""
        try:
            whole = json.loads(raw)
            if whole["v"] != VERSION:
                raise MalformedMessage(f"bundle structure of version {whole['v']}: this arrow-tq knows 1")
            chunks = [_count(size) for size in whole["chunks"]]
            fields = [_field(one, chunks) for one in whole["fields"]]
            rows = min(_count(whole["rows"]), ROWS_MAX)
            if any(field.per_row and field.count != rows for field in fields):
                raise MalformedMessage(f"bundle structure: a field of other than {rows} rows")
            return cls(rows, chunks, fields)
        except MalformedMessage:
            raise
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise MalformedMessage(f"bundle structure: {type(error).__name__}: {error}") from None


def _field(value: Mapping[str, object], chunks: Sequence[int]) -> FieldLayout:
    layout, meta, buffers = value["layout"], value["meta"], value["buffers"]
    if layout not in LAYOUTS or not isinstance(meta, dict) or not isinstance(buffers, dict):
        raise MalformedMessage(f"bundle structure: layout {layout!r}")
    found = {name: [_block(one, chunks) for one in blocks] for name, blocks in buffers.items()}
    for name in ROW_BUFFERS:
        rows = sum(block.rows for block in found.get(name, ()))
        if ((name in found or name == "values") and rows != value["count"]) or rows > ROWS_MAX:
            raise MalformedMessage(f"bundle structure: {rows} rows of {value['count']}, at most {ROWS_MAX}")
    return FieldLayout(value["key"], str(layout), _count(value["count"]), bool(value["per_row"]), meta, found)


def _block(value: Sequence[int], chunks: Sequence[int]) -> Block:
    block = Block(*map(_count, value))
    if not 1 <= block.chunk <= len(chunks) or block.offset + block.nbytes > chunks[block.chunk - 1]:
        raise MalformedMessage(f"bundle structure: block {list(block)} is outside its chunk")
    return block


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 48:
        raise MalformedMessage(f"bundle structure: {value!r} where a count belongs")
    return value
