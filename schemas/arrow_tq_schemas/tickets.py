"""Flight descriptors and tickets.

A **put** descriptor (``PutStream``) opens a stream of one field's chunks, or of step commits. A **get**
ticket is one of two kinds: ``SpanTicket`` is what our own client asks (spans of one field and layer
group, values only, in request order); ``SegmentTicket`` is what ``GetFlightInfo`` hands to any Flight
client (one field of some segments, rows carry segment and position). Ids and spans are packed as
base64 of little-endian ``SPAN_DTYPE`` rows, zlib-compressed.
"""

from __future__ import annotations

import base64
import zlib
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field as Bound, TypeAdapter, ValidationError

from arrow_tq_schemas.chunks import Count, explain
from arrow_tq_schemas.commands import Seconds, View
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.ids import SHARD_MAX
from arrow_tq_schemas.manifests import SPANS_MAX
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans

CHUNKS_PER_BATCH_MAX = 1024


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PutStream(_Wire):
    """Descriptor of a DoPut stream of chunks of one field and layer group.

    Each batch has a ``PutMessage`` as app_metadata. The server acks with ``PutAck`` JSON: at once
    after a batch whose message asks for it, and after a number of batches or bytes in any case.
    """

    kind: Literal["chunks"] = "chunks"
    run: str
    field: str
    group: Annotated[int, Bound(ge=0, le=255)] = 0


class CommitStream(_Wire):
    """Descriptor of a DoPut stream of ``StreamMessage`` JSON, each answered by ``StreamAnswers``."""

    kind: Literal["commits"] = "commits"


class PutMessage(_Wire):
    """app_metadata of one batch of a ``PutStream``."""

    header: str
    """``ChunkHeader`` JSON."""
    ack: bool = False
    """Answer after this batch."""
    more: Annotated[list[str], Bound(max_length=CHUNKS_PER_BATCH_MAX - 1)] = []
    """Headers of further chunks, whose rows follow in the same batch: what small chunks share is the
    cost of a message. Each chunk stays one of its own: stored, refused and acked by itself."""


class PutAck(_Wire):
    """How many chunks of this stream are dealt with so far, and the errors of those that were refused.

    A refused chunk is dropped, every other one is stored, and the stream goes on.
    """

    stored: int
    """Chunks of the stream dealt with so far: stored or refused."""
    errors: dict[str, dict[str, object]] = {}
    """Chunk id to the wire form of its error, for chunks refused since the last ack."""


class SpanTicket(_Wire):
    """Values of spans of one field and layer group."""

    kind: Literal["spans"] = "spans"
    run: str
    field: str
    group: Annotated[int, Bound(ge=0, le=255)] = 0
    layers: list[Annotated[int, Bound(ge=0)]] | None = None
    """Indices on the layer axis within the group, in the order wanted; None: all."""
    spans: str
    """Packed ``SPAN_DTYPE`` rows; their ids carry group 0."""
    wait_s: Seconds = 0.0
    """How long to wait for pending chunks."""
    whole: bool = False
    """Each span is one message, neither joined with others nor cut."""


class SegmentTicket(_Wire):
    """One field (and layer group) of segments, with a ``segment_id`` and a ``position`` column."""

    kind: Literal["segments"] = "segments"
    run: str
    field: str
    group: Annotated[int, Bound(ge=0, le=255)] = 0
    layers: list[Annotated[int, Bound(ge=0)]] | None = None
    segment_ids: list[str]
    start: Count = 0
    """Positions ``[start, end)`` of each segment; ``end`` None: to its last."""
    end: Count | None = None


class ShardTicket(_Wire):
    """The part of a ``SegmentTicket``'s answer whose rows are stored on one shard."""

    kind: Literal["shard"] = "shard"
    shard: Annotated[int, Bound(ge=0, le=SHARD_MAX)]
    fills: bool = False
    """Whether rows that are stored nowhere, which read as the field's fill, are in this part."""
    segments: SegmentTicket


class SqlTicket(_Wire):
    """Result of a SQL query as a stream."""

    kind: Literal["sql"] = "sql"
    query: str
    run: str | None = None


class FlightQuery(_Wire):
    """Descriptor command of GetFlightInfo: segments by id or by filter, and one field."""

    kind: Literal["flight"] = "flight"
    run: str
    field: str
    group: Annotated[int, Bound(ge=0, le=255)] = 0
    layers: list[Annotated[int, Bound(ge=0)]] | None = None
    segment_ids: list[str] | None = None
    where: str | None = None
    view: View = "lineage"
    start: Count = 0
    end: Count | None = None


class FlightFilter(_Wire):
    """Criteria of ListFlights; empty criteria list everything."""

    run: str | None = None
    where: str | None = None
    view: View = "lineage"
    limit: Annotated[int, Bound(ge=1, le=100_000)] = 1000


PutDescriptor = PutStream | CommitStream
Ticket = SpanTicket | SegmentTicket | ShardTicket | SqlTicket
_PUT: TypeAdapter[PutDescriptor] = TypeAdapter(Annotated[PutDescriptor, Bound(discriminator="kind")])
_TICKET: TypeAdapter[Ticket] = TypeAdapter(Annotated[Ticket, Bound(discriminator="kind")])
AnyModel = TypeVar("AnyModel")
AnyWire = TypeVar("AnyWire", bound=_Wire)


def parse_put(raw: bytes) -> PutDescriptor:
    """Raises ``MalformedMessage`` naming key and value."""
    return _parse(_PUT, raw, "put descriptor")


def parse_ticket(raw: bytes) -> Ticket:
    """Raises ``MalformedMessage`` naming key and value."""
    return _parse(_TICKET, raw, "ticket")


def parse(kind: type[AnyWire], raw: bytes) -> AnyWire:
    """Raises ``MalformedMessage`` naming key and value."""
    return _parse(TypeAdapter(kind), raw, kind.__name__)


def _parse(adapter: TypeAdapter[AnyModel], raw: bytes, what: str) -> AnyModel:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        raise MalformedMessage(f"{what}: {explain(error)}") from None


def pack_spans(spans: Spans) -> str:
    """Base64 of the deflated rows."""
    return base64.b64encode(zlib.compress(spans.tobytes(), 1)).decode()


def unpack_spans(text: str) -> Spans:
    """Raises ``MalformedMessage`` for what ``pack_spans`` did not make."""
    limit = SPANS_MAX * SPAN_DTYPE.itemsize
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), limit + 1)
    except (ValueError, zlib.error) as error:
        raise MalformedMessage(f"packed spans: {error}") from None
    if len(raw) > limit or len(raw) % SPAN_DTYPE.itemsize or not inflate.eof or inflate.unused_data:
        raise MalformedMessage(f"packed spans of {len(raw)} bytes: expected whole rows, {limit} at most")
    return np.frombuffer(raw, SPAN_DTYPE)
