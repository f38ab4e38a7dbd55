"""The dict again: views of what was read, in the containers that were put."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles.column import Column
from arrow_tq.bundles.objects import Decoder
from arrow_tq.bundles.pieces import Fetch, Piece, read_pieces
from arrow_tq.bundles.selection import Part, Selection, parts_of
from arrow_tq.bundles.structure import ROW_BUFFERS, Structure

Out = Mapping[object, npt.NDArray[np.generic]]


def keys_of(structure: Structure) -> list[object]:
    """The names of the fields, as they were put."""
    decoder = Decoder(())
    return [decoder.restore(field.key) for field in structure.fields]


def read_fields(
    structure: Structure, positions: Sequence[int], selection: Selection, fetch: Fetch, span_bytes: int | None
) -> dict[int, Mapping[str, Sequence[Piece]]]:
    """All that is needed of these fields, in one call of ``fetch``; pieces by field and buffer."""
    wanted: dict[object, list[Part]] = {}
    for position in positions:
        field = structure.fields[position]
        for name in field.buffers:
            by_row = name in ROW_BUFFERS and field.per_row
            wanted[position, name] = parts_of(field, name, selection.indices if by_row else None)
    pieces = read_pieces(wanted, fetch, span_bytes)
    return {
        position: {name: pieces[position, name] for name in structure.fields[position].buffers}
        for position in positions
    }


def rebuild(
    structure: Structure,
    positions: Sequence[int],
    selection: Selection,
    pieces: Mapping[int, Mapping[str, Sequence[Piece]]],
    out: Out | None = None,
) -> dict[object, object]:
    """The chosen fields and rows. ``out``: by field, a flat writable array for its values."""
    keys = keys_of(structure)
    result: dict[object, object] = {}
    for position in positions:
        key = keys[position]
        target = None if out is None else out.get(key)
        column = Column(structure.fields[position], pieces[position], selection, str(key), target)
        result[key] = column.value()
    return result
