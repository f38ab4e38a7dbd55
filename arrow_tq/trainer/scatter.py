"""Places rows read from a store into a caller's buffer, once, widening on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.backend import Backend, Read, Rows
from arrow_tq_schemas.errors import ChunkLost, Hole
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.spans import Spans

Index = tuple[slice | npt.NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where rows go: ``spans[i]`` fills ``out[places[i] : places[i] + rows]``."""

    spans: Spans
    places: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The part of one layer group in an answer."""

    group: int
    layers: tuple[int, ...] | None
    """Indices inside the group; None: all of them."""
    columns: Index
    """Where they go on the axes after the row axis; empty: the whole item."""


def group_parts(field: Field, layers: Sequence[int] | None) -> list[GroupPart]:
    """Which layers of which groups make an answer of these global layer ids (None: all)."""
    if field.layer_axis is None:
        return [GroupPart(0, None, ())]
    wanted = field.layer_ids if layers is None else tuple(layers)
    assert wanted is not None
    field.layer_index(wanted)
    place = {
        layer: (group, index) for group, ids in enumerate(field.groups) for index, layer in enumerate(ids)
    }
    parts = []
    for group, ids in enumerate(field.groups):
        chosen = [(out, place[layer][1]) for out, layer in enumerate(wanted) if place[layer][0] == group]
        if not chosen:
            continue
        inside = tuple(index for _, index in chosen)
        whole = inside == tuple(range(len(ids)))
        columns: Index = ()
        if len(chosen) < len(wanted):
            before = (slice(None),) * field.layer_axis
            columns = (*before, _as_slice([out for out, _ in chosen]))
        parts.append(GroupPart(group, None if whole else inside, columns))
    return parts


def scatter(
    backend: Backend,
    run: str,
    field: Field,
    part: GroupPart,
    placement: Placement,
    out: npt.NDArray[np.generic],
) -> None:
    """Read ``placement``'s rows of one group into ``out`` (``[rows, *item]``), each span of a chunk once.

    Raises:
        Hole: a null row of a field without ``pad``; names the position.
        ChunkLost: the answer was shorter or longer than asked.
    """
    first, copies = _deduplicate(placement)
    request = Read(run, field, part.group, part.layers, first.spans)
    pieces = _pieces(first)
    done = 0
    for rows in backend.read(request):
        offset = 0
        while offset < len(rows.values):
            piece = next(pieces, None)
            if piece is None:
                raise ChunkLost(f"field {field.name!r}: the answer has more rows than asked")
            place, left, start = piece
            count = min(left, len(rows.values) - offset)
            out[(slice(place, place + count), *part.columns)] = _padded(field, rows, offset, count, start)
            if count < left:
                pieces = _push((place + count, left - count, start + count), pieces)
            offset += count
            done += count
    wanted = int(first.spans["rows"].sum())
    if done != wanted:
        raise ChunkLost(f"field {field.name!r}: the answer has {done} rows, {wanted} were asked")
    for source, place, count in copies:
        out[(slice(place, place + count), *part.columns)] = out[
            (slice(source, source + count), *part.columns)
        ]


def _padded(field: Field, rows: Rows, offset: int, count: int, start: int) -> npt.NDArray[np.generic]:
    """``count`` rows from ``offset``, null ones as the field's pad; a copy only where some are null."""
    values = rows.values[offset : offset + count]
    if rows.valid is None:
        return values
    null = ~rows.valid[offset : offset + count]
    if not null.any():
        return values
    if field.pad_value is None:
        position = start + int(np.flatnonzero(null)[0])
        raise Hole(f"field {field.name!r}: position {position} is null", field=field.name, position=position)
    values = values.copy()
    values[null] = field.pad_value
    return values


def _pieces(placement: Placement) -> Iterator[tuple[int, int, int]]:
    """(place, rows, position) of runs of spans that are neighbours both in the answer and in the buffer."""
    spans, places = placement.spans, placement.places
    if not len(spans):
        return
    counts = spans["rows"].astype(np.int64)
    breaks = np.flatnonzero(places[1:] != places[:-1] + counts[:-1]) + 1
    firsts = np.concatenate([[0], breaks])
    totals = np.add.reduceat(counts, firsts)
    yield from zip(places[firsts].tolist(), totals.tolist(), spans["start"][firsts].tolist(), strict=True)


def _push(
    piece: tuple[int, int, int], rest: Iterator[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int]]:
    yield piece
    yield from rest


def _deduplicate(placement: Placement) -> tuple[Placement, list[tuple[int, int, int]]]:
    """The placement with each equal span once, and (source, place, rows) of the copies to make."""
    spans, places = placement.spans, placement.places
    keys = np.empty((len(spans), 3), dtype=np.uint64)
    keys[:, 0], keys[:, 1] = spans["high"], spans["low"]
    keys[:, 2] = spans["row"].astype(np.uint64) << np.uint64(32) | spans["rows"]
    _, index, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    if len(index) == len(spans):
        return placement, []
    firsts = np.sort(index)
    source = index[inverse.reshape(-1)]
    again = np.flatnonzero(source != np.arange(len(spans)))
    copies = list(
        zip(
            places[source[again]].tolist(), places[again].tolist(), spans["rows"][again].tolist(), strict=True
        )
    )
    return Placement(spans[firsts], places[firsts]), copies


def _as_slice(indices: list[int]) -> slice | npt.NDArray[np.int64]:
    """A slice where the indices are consecutive: numpy then copies without a gather."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return np.asarray(indices, dtype=np.int64)
