"""DoGet of spans, and how rows become messages of a good size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from arrow_tq.backend import Read, Rows
from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import SpanTicket, unpack_spans
from arrow_tq_server.served import ServedEngine

ALIGN_BYTES = 8
GROUP_MAX = 32
Group = list[pa.RecordBatch]
"""Batches that are made before the first of them leaves, because they hold no memory of their own; else one.

Between two messages the kernel copies megabytes, and Python goes on with cold caches: 20 us become 200.
"""


def span_answer(
    engine: ServedEngine, ticket: SpanTicket, message_bytes: int
) -> tuple[pa.Schema, Iterator[Group]]:
    """Schema and batches of the rows of a ``SpanTicket``, in request order.

    Raises:
        NotFound: no such run or field.
        MalformedMessage: layer group, layers or spans that do not fit the field.
    """
    field = engine.field(ticket.run, ticket.field)
    layers = check_layers(field, ticket.group, ticket.layers)
    spans = unpack_spans(ticket.spans)
    request = Read(ticket.run, field, ticket.group, layers, spans, ticket.wait_s, ticket.whole)
    schema = projected_schema(field, ticket.group, layers)
    kind = schema.field(0).type

    def groups() -> Iterator[Group]:
        blocks = engine.read(request)
        ready: Group = []
        for rows in blocks if ticket.whole else sized(blocks, message_bytes):
            ready.append(pa.RecordBatch.from_arrays([to_array(rows.values, rows.valid, kind)], schema=schema))
            if not rows.stay or len(ready) == GROUP_MAX:
                yield ready
                ready = []
        if ready:
            yield ready

    return schema, groups()


def check_layers(field: Field, group: int, layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """Indices on the group's layer axis, checked; None for all of them."""
    if group >= len(field.groups):
        raise MalformedMessage(f"field {field.name!r}: layer group {group}, it has {len(field.groups)}")
    if layers is None:
        return None
    count = len(field.groups[group])
    if field.layer_axis is None or not layers or min(layers) < 0 or max(layers) >= count:
        raise MalformedMessage(
            f"field {field.name!r}: layer indices {list(layers)[:16]}, group {group} has {count} layers"
        )
    return tuple(layers)


def item_shape(field: Field, group: int, layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Shape of one row of an answer."""
    shape = list(field.group_shape(group))
    if layers is not None and field.layer_axis is not None:
        shape[field.layer_axis] = len(layers)
    return tuple(shape)


def projected_schema(field: Field, group: int, layers: tuple[int, ...] | None) -> pa.Schema:
    """The schema of an answer: that of a chunk, with the chosen layers in type and metadata."""
    schema = field.arrow_schema(group)
    if layers is None or field.layer_axis is None:
        return schema
    column = schema.field(0)
    ids = [field.groups[group][index] for index in layers]
    metadata = {**column.metadata, b"arrow_tq.layer_ids": json.dumps(ids).encode()}
    kind = pa.fixed_shape_tensor(field.type.arrow, list(item_shape(field, group, layers)))
    return pa.schema([pa.field(field.name, kind, nullable=True, metadata=metadata)])


def sized(blocks: Iterable[Rows], message_bytes: int) -> Iterator[Rows]:
    """The same rows in blocks of about ``message_bytes``: small ones joined, large ones cut.

    Only joining copies; a block that is large already leaves as views of the store's own memory.
    """
    waiting: list[Rows] = []
    size = 0
    for block in blocks:
        if not len(block.values):
            continue
        if block.values.nbytes < message_bytes:
            waiting.append(block)
            size += block.values.nbytes
            if size >= message_bytes:
                yield _join(waiting)
                waiting, size = [], 0
            continue
        if waiting:
            yield _join(waiting)
            waiting, size = [], 0
        yield from _cut(block, message_bytes)
    if waiting:
        yield _join(waiting)


def padding(body_bytes: int) -> pa.Buffer:
    """app_metadata that moves a message's body to a multiple of 8 bytes in the receiver's memory.

    Before the body come tags and lengths of odd sizes, and receivers map it where it lies: numpy calls such
    arrays unaligned, and is slower on them. A guess (the header is taken to be 128 to 16,383 bytes); where it
    is wrong nothing but alignment is lost.
    """
    header_length, body_length = 2, max(1, -(-body_bytes.bit_length() // 7))
    # Tags take 1 byte, the body's 2; the padding has a length of its own.
    before = 1 + header_length + 1 + 1 + 2 + body_length
    return pa.py_buffer(bytes(-before % ALIGN_BYTES or ALIGN_BYTES))


def _join(blocks: Sequence[Rows]) -> Rows:
    if len(blocks) == 1:
        return _cut_out(blocks[0], 0, len(blocks[0].values))
    values = np.concatenate([block.values for block in blocks])
    if all(block.valid is None for block in blocks):
        return Rows(values, None)
    valid = [np.ones(len(block.values), np.bool_) if block.valid is None else block.valid for block in blocks]
    return Rows(values, np.concatenate(valid))


def _cut(block: Rows, message_bytes: int) -> Iterator[Rows]:
    rows = len(block.values)
    pieces = max(1, round(block.values.nbytes / message_bytes))
    step = -(-rows // pieces)
    for first in range(0, rows, step):
        yield _cut_out(block, first, min(first + step, rows))


def _cut_out(block: Rows, first: int, end: int) -> Rows:
    # A projection of layers is strided; a message has to be dense.
    values = np.ascontiguousarray(block.values[first:end])
    return Rows(values, None if block.valid is None else block.valid[first:end], block.stay)
