"""Places rows read from a store into a caller's buffer, once, widening on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.backend import Backend, Read, Rows
from arrow_tq.trainer.gather import Block, Cursor, Gather, Placement as Placement, Run
from arrow_tq_schemas.errors import ChunkLost, Hole
from arrow_tq_schemas.fields import Field

Array = npt.NDArray[np.generic]
Index = tuple[slice | npt.NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The part of one layer group in an answer."""

    group: int
    layers: tuple[int, ...] | None
    """Indices inside the group; None: all of them."""
    places: tuple[int, ...]
    """Where they go on the layer axis of the answer; empty: the whole item."""


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
        places = () if len(chosen) == len(wanted) else tuple(out for out, _ in chosen)
        parts.append(GroupPart(group, None if whole else inside, places))
    return parts


def scatter(
    backend: Backend,
    run: str,
    field: Field,
    part: GroupPart,
    wanted: Placement | Gather,
    out: Array,
    wait_s: float = 0.0,
) -> None:
    """Read the wanted rows of one group into ``out`` (``[rows, *item]``), each row of a chunk once.

    Raises:
        Hole: a null row of a field without ``pad``; names the position.
        ChunkLost: the answer was shorter or longer than asked.
    """
    gather = wanted if isinstance(wanted, Gather) else Gather.of(wanted)
    request = Read(run, field, part.group, part.layers, gather.spans, wait_s)
    target = _Target(field, part.places, out)
    cursor = Cursor(gather)
    # Once: it is a sum over all spans, and there may be as many blocks as spans.
    wanted_rows = gather.rows
    done = 0
    for rows in backend.read(request):
        end = done + len(rows.values)
        if end > wanted_rows:
            break
        values = convert(field, _padded(field, rows, done, gather), out.dtype)
        runs = cursor.runs(done, end)
        if runs is None:
            target.index(gather.block(done, end), values)
        else:
            target.copy(runs, values)
        done = end
        # Not held while the next block comes: its memory is then the next one's, and warm.
        del rows, values
    else:
        if done == wanted_rows:
            return
        raise ChunkLost(f"field {field.name!r}: the answer has {done} rows, {wanted_rows} were asked")
    raise ChunkLost(f"field {field.name!r}: the answer has more rows than asked")


def convert(field: Field, values: Array, dtype: np.dtype[np.generic]) -> Array:
    """Stored values as ``dtype`` needs them: bits of bfloat16 become numbers where floats are wanted."""
    if field.dtype == "bfloat16" and dtype.kind == "f":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


class _Target:
    """The buffer, and where on its layer axis rows go."""

    def __init__(self, field: Field, places: tuple[int, ...], out: Array) -> None:
        self._places = places
        self._out = out
        self._columns: Index = ()
        if places:
            assert field.layer_axis is not None
            self._columns = (*(slice(None),) * field.layer_axis, _as_slice(places))

    def copy(self, runs: Sequence[Run], values: Array) -> None:
        """Place rows run by run."""
        for source, place, count in runs:
            self._out[(slice(place, place + count), *self._columns)] = values[source : source + count]

    def index(self, block: Block, values: Array) -> None:
        """Place rows by an index of each."""
        sources, places = block.indices()
        if not self._columns or isinstance(self._columns[-1], slice):
            self._out[(places, *self._columns)] = values[sources]
            return
        before = self._columns[:-1]
        for index, layer in enumerate(self._places):
            self._out[(places, *before, layer)] = values[(sources, *before, index)]


def _padded(field: Field, rows: Rows, done: int, gather: Gather) -> Array:
    """The block's values, null rows as the field's pad; a copy only where some are null."""
    if rows.valid is None or rows.valid.all():
        return rows.values
    null = ~rows.valid
    if field.pad_value is None:
        position = gather.position(done + int(np.flatnonzero(null)[0]))
        raise Hole(f"field {field.name!r}: position {position} is null", field=field.name, position=position)
    values = rows.values.copy()
    values[null] = field.pad_value
    return values


def _as_slice(indices: tuple[int, ...]) -> slice | npt.NDArray[np.int64]:
    """A slice where the indices are consecutive: numpy then copies without a gather."""
    if indices == tuple(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return np.asarray(indices, dtype=np.int64)
