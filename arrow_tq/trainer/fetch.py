"""Fetch: manifests in, one packed buffer a field out. Rows are read once and placed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from arrow_tq.backend import Backend
from arrow_tq.intervals import clip, domain_ranges, gaps
from arrow_tq.parallel import PART_BYTES_MIN, run_all
from arrow_tq.trainer.data import Column, Data
from arrow_tq.trainer.gather import Gather, Placement
from arrow_tq.trainer.origin import Origin
from arrow_tq.trainer.scatter import convert, group_parts, scatter
from arrow_tq_schemas.errors import Hole, InvalidField, Misaligned
from arrow_tq_schemas.fields import TOKEN_FIELD, Field
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans, empty_spans

Array = npt.NDArray[np.generic]
HOLES_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """How a fetch reads.

    Args:
        threads_max: parts (fields, layer groups, runs of spans) that are read at the same time.
        parallel_bytes_min: smaller fetches read one part after another: threads would cost more.
        wait_s: how long to wait for chunks whose step is still open, before ``ChunkPending``.
    """

    threads_max: int = 4
    parallel_bytes_min: int = 1 << 20
    wait_s: float = 60.0

    def run(self, reads: Sequence[Callable[[], None]], nbytes: int) -> None:
        """Do the reads of a fetch of so many bytes."""
        run_all(reads, self.threads_max if nbytes >= self.parallel_bytes_min else 1)


def fetch(
    backend: Backend,
    run: str,
    manifests: Sequence[Manifest],
    fields: Sequence[Field],
    layers: Sequence[int] | None = None,
    out: Mapping[str, object] | None = None,
    reading: Reading | None = None,
) -> Data:
    """The fields' rows of the segments, packed in the order of ``manifests``.

    Args:
        layers: global layer ids, in the order wanted; fields without a layer axis ignore it.
        out: buffers to fill instead of new ones, by field: numpy or CPU torch ``[sum of T, *item]``, any
            dtype that the field's fits in without loss. What they hold after an error means nothing.
        reading: bounds.

    Raises:
        Hole: positions in a field's domain that nobody wrote; names field, segment and positions.
        ChunkReleased, ChunkLost, ChunkPending: naming the chunks.
    """
    reading = reading or Reading()
    origin = Origin.of(manifests)
    offsets = origin.offsets
    plans = {field.name: _place(field, manifests, offsets) for field in fields}
    columns = {}
    reads: list[Callable[[], None]] = []
    for field in fields:
        placement, complement = plans[field.name]
        chosen = chosen_layers(field, layers)
        packed = buffer(field, chosen, origin.tokens, None if out is None else out.get(field.name))
        fill = convert(field, np.asarray(field.fill_value).reshape(1), packed.dtype)[0]
        for start, end in complement:
            packed[start:end] = fill
        reads += read_parts(backend, run, field, chosen, placement, packed, reading.wait_s)
        columns[field.name] = Column(field, chosen, packed, offsets, origin.rows(field))
    reading.run(reads, sum(column.nbytes for column in columns.values()))
    return Data(columns, offsets, origin)


def read_parts(
    backend: Backend,
    run: str,
    field: Field,
    layers: tuple[int, ...] | None,
    placement: Placement,
    out: Array,
    wait_s: float,
) -> list[Callable[[], None]]:
    """Calls that each read a part into ``out``: a layer group, or some spans of one; none for nothing."""
    gather = Gather.of(placement)
    if not gather.rows:
        return []
    parts = group_parts(field, layers)
    count = min(-(-backend.reads_at_once // len(parts)), out.nbytes // PART_BYTES_MIN)
    return [
        partial(scatter, backend, run, field, part, spans, out, wait_s)
        for part in parts
        for spans in gather.parts(count)
    ]


def check_tokens(data: Column, segment_ids: Sequence[str], expected: Array | Sequence[Array]) -> None:
    """Compare fetched token ids with what the caller has: a packed array, or one array a segment.

    Raises:
        Misaligned: naming segment, position, the stored and the expected id (or both lengths).
    """
    if isinstance(expected, np.ndarray) and expected.ndim == 1 and expected.dtype != object:
        if len(expected) != len(data.packed):
            raise Misaligned(f"expect_tokens has {len(expected)} tokens, the segments {len(data.packed)}")
        expected = np.split(expected, data.offsets[1:-1])
    if len(expected) != len(data):
        raise Misaligned(f"expect_tokens has {len(expected)} segments, the batch {len(data)}")
    for name, stored, tokens in zip(segment_ids, data, expected, strict=True):
        wanted = np.asarray(tokens)
        if len(wanted) != len(stored):
            raise Misaligned(
                f"segment {name!r} has {len(stored)} tokens, expected {len(wanted)}", segment_id=name
            )
        different = np.flatnonzero(stored != wanted)
        if len(different):
            at = int(different[0])
            raise Misaligned(
                f"segment {name!r}, position {at}: token {stored[at]} is stored, expected {wanted[at]}",
                segment_id=name,
                position=at,
            )


def token_field(fields: Mapping[str, Field]) -> Field:
    """The run's token field; raises ``InvalidField`` where it has none to check against."""
    if TOKEN_FIELD not in fields:
        raise InvalidField(f"expect_tokens needs the field {TOKEN_FIELD!r}, which this run does not have")
    return fields[TOKEN_FIELD]


def _place(
    field: Field, manifests: Sequence[Manifest], offsets: npt.NDArray[np.int64]
) -> tuple[Placement, list[tuple[int, int]]]:
    """Where the spans of a field go, and the packed rows outside its domain."""
    spans: list[Spans] = [empty_spans()]
    places: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    complement: list[tuple[int, int]] = []
    for manifest, offset in zip(manifests, offsets.tolist(), strict=False):
        own = manifest.spans.get(field.name)
        own = empty_spans() if own is None else own
        domain = domain_ranges(field, manifest.num_tokens, manifest.sampled)
        refuse_holes(field, manifest, gaps(own, domain))
        last = 0
        for start, end in domain.tolist():
            piece = clip(own, start, end)
            spans.append(piece)
            places.append(piece["start"] + offset)
            complement.append((offset + last, offset + start))
            last = end
        complement.append((offset + last, offset + manifest.num_tokens))
    placement = Placement(np.concatenate(spans).astype(SPAN_DTYPE, copy=False), np.concatenate(places))
    return placement, [(start, end) for start, end in complement if start < end]


def refuse_holes(field: Field, manifest: Manifest, holes: npt.NDArray[np.int64]) -> None:
    """Raise ``Hole``, naming segment and positions, unless ``holes`` (``[n, 2]``, half-open) is empty."""
    if not len(holes):
        return
    count = int((holes[:, 1] - holes[:, 0]).sum())
    ranges = [f"{start}..{end - 1}" for start, end in holes[:HOLES_NAMED_MAX].tolist()]
    more = ", ..." if len(holes) > HOLES_NAMED_MAX else ""
    raise Hole(
        f"segment {manifest.segment_id!r}, field {field.name!r}: nobody wrote {count} of its positions: "
        f"{', '.join(ranges)}{more}",
        segment_id=manifest.segment_id,
        field=field.name,
        positions=[int(edge) for edge in holes[:HOLES_NAMED_MAX].reshape(-1)],
        count=count,
    )


def chosen_layers(field: Field, layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """Global layer ids in the order asked for; None for a field without layers."""
    if field.layer_axis is None:
        return None
    if layers is None:
        return field.layer_ids
    chosen = tuple(int(layer) for layer in layers)
    field.layer_index(chosen)
    return chosen


def buffer(field: Field, layers: tuple[int, ...] | None, rows: int, given: object) -> Array:
    """``[rows, *item]`` to read into: new memory, or a view of what the caller gave.

    Raises:
        InvalidField: what was given has another shape, cannot be written, or does not hold the field.
    """
    wanted = (rows, *item_shape(field, layers))
    if given is None:
        return np.empty(wanted, field.type.numpy)
    if hasattr(given, "data_ptr"):
        from arrow_tq import tensors

        given = tensors.as_buffer(field, given)
    if not isinstance(given, np.ndarray) or given.shape != wanted or not given.flags.writeable:
        shown = getattr(given, "shape", type(given).__name__)
        raise InvalidField(f"out[{field.name!r}]: expected a writable array of shape {wanted}, got {shown}")
    array = cast("Array", given)
    if field.dtype == "bfloat16":
        fits = array.dtype in (np.uint16, np.float32, np.float64)
    else:
        fits = np.can_cast(field.type.numpy, array.dtype, "safe")
    if not fits:
        raise InvalidField(f"out[{field.name!r}]: {field.dtype} does not fit {array.dtype} without loss")
    return array


def item_shape(field: Field, layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Shape of one token's item with these layers alone."""
    shape = list(field.shape)
    if field.layer_axis is not None and layers is not None:
        shape[field.layer_axis] = len(layers)
    return tuple(shape)
