"""Takes a chunk from the network: nothing in it is believed until it was looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq_schemas.chunks import Chunk, ChunkHeader, from_array, verify
from arrow_tq_schemas.commands import RunInfo
from arrow_tq_schemas.errors import MalformedMessage, StaleEpoch, ValueOutOfRange
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import PutStream


def rows_of(
    stream: PutStream, field: Field, headers: Sequence[ChunkHeader], batch: pa.RecordBatch
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_] | None]:
    """Values ``[rows, *item]`` and validity of a batch, over its own memory, safe to be looked at.

    Raises:
        MalformedMessage: its structure is not what the stream says, or its rows not those of the headers.
    """
    what = f"chunk {headers[0].id}"
    check_group(what, stream, field)
    expected = field.arrow_schema(stream.group)
    if not batch.schema.equals(expected):
        raise MalformedMessage(f"{what}: schema {batch.schema.types}, expected {expected.types}")
    try:
        # The cheap check misses lying lengths, which crash on first touch.
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise MalformedMessage(f"{what}: {str(error).splitlines()[0]}") from None
    said = sum(header.rows for header in headers)
    if batch.num_rows != said and len(headers) == 1:
        raise MalformedMessage(f"{what}: {batch.num_rows} rows, its header says {said}")
    if batch.num_rows != said:
        raise MalformedMessage(
            f"{what} and {len(headers) - 1} more: {batch.num_rows} rows, their headers say {said}"
        )
    return from_array(batch.column(0), field.group_shape(stream.group))


def checked(
    stream: PutStream,
    field: Field,
    info: RunInfo,
    header: ChunkHeader,
    values: npt.NDArray[np.generic],
    valid: npt.NDArray[np.bool_] | None,
) -> Chunk:
    """The chunk of these rows, which keeps their memory where it needs no cleaning.

    Raises:
        MalformedMessage: names or checksum do not fit; says which.
        ValueOutOfRange: an expert id beyond the field's, naming value and position.
        StaleEpoch: the writer joined an older epoch.
    """
    what = f"chunk {header.id}"
    check_header(what, stream, field, info, header)
    if valid is not None and valid.all():
        valid = None
    if valid is not None and values[~valid].any():
        # Null slots may hold what was in the sender's memory: they are stored, and hashed, as zero.
        values = values.copy()
        values[~valid] = 0
    chunk = Chunk(header, values, valid)
    if not verify(chunk):
        raise MalformedMessage(f"{what}: its values do not have the checksum {header.checksum}")
    check_values(field, values, header.start)
    return chunk


def check_group(what: str, stream: PutStream, field: Field) -> None:
    """Raise ``MalformedMessage`` for a layer group that the field does not have."""
    if stream.group >= len(field.groups):
        raise MalformedMessage(f"{what}: layer group {stream.group}, {field.name!r} has {len(field.groups)}")


def check_header(what: str, stream: PutStream, field: Field, info: RunInfo, header: ChunkHeader) -> None:
    """Raise ``MalformedMessage`` or ``StaleEpoch`` for a header that does not belong here."""
    check_group(what, stream, field)
    said = (header.run, header.field, header.chunk_id.group)
    if said != (stream.run, stream.field, stream.group):
        raise MalformedMessage(
            f"{what}: of {said}, the stream is of {(stream.run, stream.field, stream.group)}"
        )
    if header.epoch != info.epoch:
        raise StaleEpoch(
            f"{what}: written in epoch {header.epoch}, run {info.run!r} is in epoch {info.epoch}",
            epoch=header.epoch,
            current=info.epoch,
        )


def check_values(field: Field, values: npt.NDArray[np.generic], start: int) -> None:
    """What a checksum cannot tell: whether the sender's values are ones that the field may hold."""
    highest = _highest(field, values.dtype)
    if highest is None or not values.size:
        return
    lowest = 0
    if int(values.max()) <= highest and int(values.min()) >= lowest:
        return
    wrong = np.greater(values, highest) | np.less(values, lowest)
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise ValueOutOfRange(
            f"field {field.name!r}: value {values[place]} at position {start + place[0]} "
            f"is not within {lowest} to {highest}",
            field=field.name,
            value=int(values[place]),
            position=start + place[0],
        )


def is_bounded(field: Field, kind: np.dtype[np.generic]) -> bool:
    """Whether ``check_values`` has to look at values of that dtype."""
    return _highest(field, kind) is not None


def _highest(field: Field, kind: np.dtype[np.generic]) -> int | None:
    """The largest value that a field of values from 0 up may hold; None where its dtype holds no other."""
    if field.dtype == "bool":
        highest = 1
    elif field.num_experts is not None:
        highest = field.num_experts - 1
    else:
        return None
    return None if kind.kind == "u" and highest >= (1 << 8 * kind.itemsize) - 1 else highest
