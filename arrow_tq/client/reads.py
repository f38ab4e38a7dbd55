"""Reads: spans out as tickets, rows back in their order, all of them or an error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice

import numpy as np
import pyarrow as pa

from arrow_tq.backend import Read, Rows
from arrow_tq.client.ahead import ReadAhead
from arrow_tq.client.connection import Connection
from arrow_tq_schemas.chunks import from_array
from arrow_tq_schemas.errors import InternalError
from arrow_tq_schemas.spans import Spans
from arrow_tq_schemas.tickets import SpanTicket, pack_spans

ANSWER_BYTES = 1 << 30
"""What one stream asks for at a time: so much comes within any deadline."""
AHEAD_MAX = 16
"""Messages that one stream may be ahead of its consumer: of some 2 MiB each, and one split's at most."""


def read(connection: Connection, request: Read) -> Iterator[Rows]:
    """The rows of all spans, in request order.

    A large read is cut into pieces that ``get_streams`` streams fetch at a time. One stream asks for as much
    as it can: between two answers the wire is empty for as long as a call takes.
    """
    streams = connection.options.get_streams
    piece_bytes = connection.options.get_split_bytes if streams > 1 else ANSWER_BYTES
    pieces = split(request, int(piece_bytes), connection.options.get_spans_max)
    if len(pieces) == 1 or streams < 2:
        for spans in pieces:
            yield from _stream(connection, request, spans)
        return
    running: list[ReadAhead] = []
    waiting = iter(pieces)
    try:
        for spans in waiting:
            source = partial(_stream, connection, request, spans)
            ahead = ReadAhead(source, AHEAD_MAX, "read", "arrow-tq-read")
            ahead.start()
            running.append(ahead)
            if len(running) == int(streams):
                yield from _taken(running.pop(0))
        while running:
            yield from _taken(running.pop(0))
    finally:
        for ahead in running:
            ahead.stop()


def _taken(ahead: ReadAhead) -> Iterator[Rows]:
    try:
        while (rows := ahead.take()) is not None:
            yield rows
    finally:
        ahead.stop()


def split(request: Read, piece_bytes: int, spans_max: int) -> list[Spans]:
    """The spans in pieces of at most ``piece_bytes`` of payload (or one row) and ``spans_max`` spans."""
    row_bytes = int(np.prod(request.item_shape, dtype=np.int64)) * request.field.type.numpy.itemsize
    rows_max = max(1, piece_bytes // row_bytes)
    spans = request.spans
    if request.whole:
        return _whole(spans, rows_max, spans_max)
    if len(spans) <= spans_max and int(spans["rows"].sum(dtype=np.int64)) <= rows_max:
        return [spans]
    pieces: list[Spans] = []
    first = 0
    ends = np.cumsum(spans["rows"], dtype=np.int64)
    while first < len(spans):
        before = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, before + rows_max, side="right"))
        if end == first:
            pieces.extend(_cut(spans[first : first + 1], rows_max))
            first += 1
            continue
        end = min(end, first + spans_max)
        pieces.append(spans[first:end])
        first = end
    return pieces


def _whole(spans: Spans, rows_max: int, spans_max: int) -> list[Spans]:
    """The same without cutting a span."""
    ends = np.cumsum(spans["rows"], dtype=np.int64)
    pieces: list[Spans] = []
    first, before = 0, 0
    while first < len(spans):
        end = max(int(np.searchsorted(ends, before + rows_max, side="right")), first + 1)
        end = min(end, first + spans_max)
        pieces.append(spans[first:end])
        first, before = end, int(ends[end - 1])
    return pieces


def _cut(span: Spans, rows_max: int) -> list[Spans]:
    rows = int(span["rows"][0])
    parts = []
    for first in range(0, rows, rows_max):
        part = span.copy()
        part["start"] += first
        part["row"] += first
        part["rows"] = min(rows_max, rows - first)
        parts.append(part)
    return parts


def _stream(connection: Connection, request: Read, spans: Spans) -> Iterator[Rows]:
    """The rows of one ticket; never fewer than asked."""
    wanted = int(spans["rows"].sum(dtype=np.int64))
    if not wanted:
        return
    what = f"read of {request.field.name!r}"
    ticket = SpanTicket(
        run=request.run,
        field=request.field.name,
        group=request.group,
        layers=None if request.layers is None else list(request.layers),
        spans=pack_spans(spans),
        wait_s=request.wait_s,
        whole=request.whole,
    )
    deadline_s = connection.options.read_s + request.wait_s
    raw = ticket.model_dump_json().encode()
    batches = connection.retrying(lambda: _opened(connection, raw, deadline_s, what))
    kind = _value_type(request)
    seen = 0
    for batch in batches:
        rows = Rows(*from_array(_column(batch, kind, what), request.item_shape))
        seen += len(rows.values)
        yield rows
        # Not held while the next one comes: its memory is then the next one's, and warm.
        del batch, rows
    if seen != wanted:
        raise InternalError(f"{what}: {connection.url} gave {seen} rows, {wanted} were asked")


def _opened(connection: Connection, ticket: bytes, deadline_s: float, what: str) -> Iterator[pa.RecordBatch]:
    """The batches, the first already here: what fails before it can safely be asked again."""
    reader = connection.get(ticket, deadline_s, what)
    batches = connection.batches(reader, what, deadline_s)
    # An iterator of it, which lets go of it: a local variable would hold it to the end.
    return chain(list(islice(batches, 1)), batches)


def _value_type(request: Read) -> pa.DataType:
    value = request.field.type.arrow
    return pa.fixed_shape_tensor(value, list(request.item_shape)) if request.item_shape else value


def _column(batch: pa.RecordBatch, kind: pa.DataType, what: str) -> pa.Array:
    """The one column of an answer, checked before its memory is looked at."""
    if batch.num_columns != 1 or batch.schema.field(0).type != kind:
        raise InternalError(f"{what}: an answer of {batch.schema.types}, expected {kind}")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InternalError(f"{what}: a malformed answer: {str(error).splitlines()[0]}") from None
    return batch.column(0)
