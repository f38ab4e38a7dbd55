"""DoGet of segments for any Flight client: rows that say of which segment and position they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.calls import read_table
from arrow_tq.client.shard_reads import shard_numbers
from arrow_tq.intervals import bounded, clip, domain_ranges, ends_of, gaps, restrict, union
from arrow_tq.trainer.scatter import GroupPart, Placement, scatter
from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.commands import GetSegments, View
from arrow_tq_schemas.errors import Hole, InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans, empty_spans
from arrow_tq_schemas.tickets import SegmentTicket
from arrow_tq_server.gets import check_layers, item_shape, projected_schema
from arrow_tq_server.served import ServedEngine

HOLES_NAMED_MAX = 3


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Positions ``[start, end)`` of one segment."""

    manifest: Manifest
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of an answer that are stored on one shard; with ``fills`` also those stored nowhere."""

    shard: int
    fills: bool


def segment_schema(field: Field, group: int, layers: tuple[int, ...] | None) -> pa.Schema:
    """``segment_id``, ``position`` and the field."""
    value = projected_schema(field, group, layers).field(0)
    return pa.schema(
        [
            pa.field("segment_id", pa.string(), nullable=False),
            pa.field("position", pa.int64(), nullable=False),
            value,
        ]
    )


def manifests(engine: ServedEngine, run: str, ids: Sequence[str], view: View = "lineage") -> list[Manifest]:
    """Manifests of segments (or of all segments of sessions), in the order asked."""
    reply = engine.execute(GetSegments(run=run, ids=list(ids), view=view))
    return [Manifest.decode(blob) for blob in reply.blobs[1:]]


def segment_names(blob: bytes) -> list[tuple[str, str]]:
    """(run, segment id) of each row of a segments' table."""
    table = read_table(blob)
    return list(zip(table["run"].to_pylist(), table["segment_id"].to_pylist(), strict=True))


def pieces(found: Sequence[Manifest], field: Field, start: int, end: int | None) -> list[Piece]:
    """The asked positions of each segment, as far as it has rows of the field (T, or T-1)."""
    chosen = []
    for manifest in found:
        rows = manifest.num_tokens - 1 if field.domain == "forwarded" else manifest.num_tokens
        last = max(rows, 0) if end is None else min(end, rows)
        chosen.append(Piece(manifest, min(start, last), last))
    return chosen


def shards_of(found: Sequence[Manifest], field: Field) -> list[int]:
    """The shards that hold rows of the field of these segments, ascending."""
    numbers = [np.unique(shard_numbers(_own(manifest, field))) for manifest in found]
    return [int(one) for one in np.unique(np.concatenate([*numbers, np.empty(0, np.int64)]))]


def part_of(chosen: Sequence[Piece], field: Field, part: Part) -> list[Piece]:
    """The pieces of the pieces that are in this part, in the same order."""
    found = []
    for piece in chosen:
        spans = restrict(_own(piece.manifest, field), _domain(field, piece))
        here = spans[shard_numbers(spans) == part.shard]
        ranges = np.stack([here["start"], ends_of(here)], axis=1)
        if part.fills:
            whole = np.array([[piece.start, piece.end]], np.int64)
            ranges = np.concatenate([ranges, gaps(spans, whole)])
        found += [Piece(piece.manifest, start, end) for start, end in union(ranges).tolist()]
    return found


def segment_answer(
    engine: ServedEngine, ticket: SegmentTicket, message_bytes: int, shard_part: Part | None = None
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and batches of a ``SegmentTicket``, or of a part. Outside the field's domain rows are its fill.

    Raises:
        NotFound, ChunkReleased, ChunkLost: as their names say.
        Hole: positions inside the domain that nobody wrote, naming segment, field and positions.
    """
    field = engine.field(ticket.run, ticket.field)
    layers = check_layers(field, ticket.group, ticket.layers)
    if ticket.end is not None and ticket.end < ticket.start:
        raise InvalidInput(f"positions [{ticket.start}, {ticket.end}): the end lies before the start")
    schema = segment_schema(field, ticket.group, layers)
    chosen = pieces(manifests(engine, ticket.run, ticket.segment_ids), field, ticket.start, ticket.end)
    for piece in chosen:
        _refuse_holes(field, piece)
    if shard_part is not None:
        chosen = part_of(chosen, field, shard_part)
    part = GroupPart(ticket.group, layers, ())
    shape = item_shape(field, ticket.group, layers)
    row_bytes = math.prod(shape) * field.type.numpy.itemsize
    rows_max = max(1, message_bytes // row_bytes)

    def batches() -> Iterator[pa.RecordBatch]:
        for window in _windows(chosen, rows_max):
            values = np.empty((sum(piece.rows for piece in window), *shape), field.type.numpy)
            _fill(engine, ticket.run, field, part, window, values)
            columns = [*_labels(window), to_array(values, None, schema.field(2).type)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return schema, batches()


def _windows(chosen: Sequence[Piece], rows_max: int) -> Iterator[list[Piece]]:
    """The same positions in lists of at most ``rows_max`` rows: short segments share a message."""
    window: list[Piece] = []
    room = rows_max
    for piece in chosen:
        start = piece.start
        while start < piece.end:
            end = min(piece.end, start + room)
            window.append(Piece(piece.manifest, start, end))
            room -= end - start
            start = end
            if not room:
                yield window
                window, room = [], rows_max
    if window:
        yield window


def _fill(
    engine: ServedEngine,
    run: str,
    field: Field,
    part: GroupPart,
    window: Sequence[Piece],
    values: npt.NDArray[np.generic],
) -> None:
    spans: list[Spans] = [empty_spans()]
    places: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    offset = 0
    for piece in window:
        domain = _domain(field, piece)
        own = restrict(_own(piece.manifest, field), domain)
        covered = int(own["rows"].sum())
        if covered < piece.rows:
            values[offset : offset + piece.rows] = field.fill_value
        spans.append(own)
        places.append(own["start"] - piece.start + offset)
        offset += piece.rows
    joined = np.concatenate(spans).astype(SPAN_DTYPE, copy=False)
    if len(joined):
        scatter(engine, run, field, part, Placement(joined, np.concatenate(places)), values)


def _labels(window: Sequence[Piece]) -> list[pa.Array]:
    names = [pa.repeat(pa.scalar(piece.manifest.segment_id, pa.string()), piece.rows) for piece in window]
    positions = [np.arange(piece.start, piece.end, dtype=np.int64) for piece in window]
    return [pa.concat_arrays(names), pa.array(np.concatenate(positions))]


def _domain(field: Field, piece: Piece) -> npt.NDArray[np.int64]:
    manifest = piece.manifest
    return bounded(domain_ranges(field, manifest.num_tokens, manifest.sampled), piece.start, piece.end)


def _own(manifest: Manifest, field: Field) -> Spans:
    found = manifest.spans.get(field.name)
    return empty_spans() if found is None else found


def _refuse_holes(field: Field, piece: Piece) -> None:
    holes = gaps(clip(_own(piece.manifest, field), piece.start, piece.end), _domain(field, piece))
    if not len(holes):
        return
    count = int((holes[:, 1] - holes[:, 0]).sum())
    named = [f"{start}..{end - 1}" for start, end in holes[:HOLES_NAMED_MAX].tolist()]
    more = ", ..." if len(holes) > HOLES_NAMED_MAX else ""
    raise Hole(
        f"segment {piece.manifest.segment_id!r}, field {field.name!r}: nobody wrote {count} of its "
        f"positions: {', '.join(named)}{more}",
        segment_id=piece.manifest.segment_id,
        field=field.name,
        positions=[int(edge) for edge in holes[:HOLES_NAMED_MAX].reshape(-1)],
        count=count,
    )
