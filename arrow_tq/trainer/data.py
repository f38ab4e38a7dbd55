"""What a fetch gives: one column a field, each segment a view of one packed buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.trainer.origin import Origin
from arrow_tq.trainer.scatter import convert
from arrow_tq.trainer.versions import Versions
from arrow_tq_schemas.errors import Conflict, InvalidField, InvalidInput, NotFound
from arrow_tq_schemas.fields import Field

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One field of several segments.

    Attributes:
        field: its declaration.
        layers: global layer ids along the layer axis, or None for a field without one.
        packed: ``[sum of T, *item]``, segment after segment; a ``forwarded`` field's last row is fill.
        offsets: ``[segments + 1]`` int64, where each segment's T rows begin in ``packed``.
        rows: ``[segments]`` int64, rows that each segment's array has (T, or T - 1 if forwarded).
    """

    field: Field
    layers: tuple[int, ...] | None
    packed: npt.NDArray[np.generic]
    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> npt.NDArray[np.generic]:
        """Segment ``index``'s array ``[rows, *item]``, a view of ``packed``."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        index %= len(self)
        start = int(self.offsets[index])
        return self.packed[start : start + int(self.rows[index])]

    def __iter__(self) -> Iterator[npt.NDArray[np.generic]]:
        return (self[index] for index in range(len(self)))

    @property
    def fill(self) -> np.generic:
        """The field's fill in the buffer's dtype."""
        fill: np.generic = convert(self.field, np.array([self.field.fill_value]), self.packed.dtype)[0]
        return fill

    @property
    def nbytes(self) -> int:
        """Bytes of the packed values."""
        return self.packed.nbytes


class Data(Mapping[str, Column]):
    """A fetch's answer: ``data[field][i]`` is segment i's array of that field.

    ``bfloat16`` fields are their bits as uint16 (numpy has no such type); ``tensor`` gives the real thing.

    Attributes:
        offsets: ``[segments + 1]`` int64, where each segment's T rows begin in packed arrays (what
            attention kernels call ``cu_seqlens``).
        origin: the segments, and which of their tokens were sampled and carry loss.
    """

    def __init__(self, columns: Mapping[str, Column], offsets: npt.NDArray[np.int64], origin: Origin) -> None:
        self._columns: dict[str, Column] | None = dict(columns)
        self.offsets = offsets
        self.origin = origin

    @property
    def versions(self) -> Versions:
        """Which weight version sampled each token: ``data.versions[i]`` is segment i's ``[T]`` int32.

        Places in ``data.versions.names``, -1 for a token that was not sampled. Needs no field.
        """
        return self.origin.versions

    def __getitem__(self, field: str) -> Column:
        columns = self._open()
        if field not in columns:
            raise NotFound(f"field {field!r} was not fetched; these were: {', '.join(columns)}", field=field)
        return columns[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    @property
    def nbytes(self) -> int:
        """Bytes of all packed buffers."""
        return sum(column.nbytes for column in self._open().values())

    def packed(self, field: str, rebase: bool = False) -> Array:
        """``[sum of T, *item]``, segment after segment.

        Args:
            field: a fetched field.
            rebase: its values are positions in their own segment (indexer top-k): make them positions in
                the packed array. The field's ``pad`` (-1) stays. A copy, int32 or int64 as they need.

        Raises:
            InvalidField: ``rebase`` of a field that is no signed integer.
        """
        column = self[field]
        return rebased(column) if rebase else column.packed

    def padded(self, field: str, length: int | None = None, value: float | None = None) -> Array:
        """``[segments, length, *item]``, each segment from index 0, a copy.

        Args:
            field: a fetched field.
            length: the longest segment's T when left out.
            value: what the rest holds; the field's fill when left out.

        Raises:
            InvalidInput: a segment is longer than ``length``; names it.
        """
        column = self[field]
        longest = int(self.origin.lengths.max(initial=0))
        length = longest if length is None else length
        if length < longest:
            index = int(np.argmax(self.origin.lengths))
            raise InvalidInput(
                f"segment {self.origin.segment_ids[index]!r} has {longest} tokens, length is {length}"
            )
        filler = column.fill if value is None else value
        out = np.full((len(column), length, *column.packed.shape[1:]), filler, column.packed.dtype)
        for index, rows in enumerate(column):
            out[index, : len(rows)] = rows
        return out

    def response(self, field: str) -> list[Array]:
        """By segment, rows from its first sampled position on, views: what trainers call response-only.

        Positions between two turns are in it, and read as the field's fill.
        """
        column = self[field]
        starts = self.origin.response_starts().tolist()
        return [rows[start:] for rows, start in zip(column, starts, strict=True)]

    def sampled(self, field: str) -> list[Array]:
        """By segment, the rows of its sampled positions alone, in order; views where they are one range."""
        found: list[Array] = []
        for rows, ranges in zip(self[field], self.origin.sampled, strict=True):
            parts = [rows[start:end] for start, end in ranges.tolist()]
            found.append(parts[0] if len(parts) == 1 else np.concatenate([rows[:0], *parts]))
        return found

    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """``[sum of T]`` uint8: 1 for tokens that carry loss in their segment, from its steps' ranges."""
        return self.origin.mask(self.origin.loss)

    def tensor(self, field: str, dtype: str | None = None, device: object = None) -> torch.Tensor:
        """The packed column as a torch tensor ``[sum of T, *item]``, widened to ``dtype`` if asked.

        Shares memory with the column where the dtype allows. uint16 is widened to int32 (torch's own
        uint16 lacks most operations). With a CUDA ``device`` the stored, narrow bytes go there from pinned
        memory without blocking, and are widened there.
        """
        from arrow_tq import tensors

        column = self[field]
        if device is None:
            return tensors.from_storage(column.packed, column.field.dtype, dtype)
        return tensors.to_device(column.packed, column.field.dtype, dtype, device)

    def close(self) -> None:
        """Let go of the buffers. Views that were taken stay valid."""
        self._columns = None

    def _open(self) -> dict[str, Column]:
        if self._columns is None:
            raise Conflict("this data was closed: fetch again")
        return self._columns


def rebased(column: Column) -> Array:
    """A copy of a packed column of positions, each moved by its segment's place; ``pad`` stays."""
    kind = column.packed.dtype
    if kind.kind != "i":
        raise InvalidField(
            f"field {column.field.name!r}: {column.field.dtype} values are no positions that can be moved"
        )
    wide = np.int64 if kind.itemsize > 4 or column.offsets[-1] > np.iinfo(np.int32).max else np.int32
    out = column.packed.astype(wide)
    pad = -1 if column.field.pad is None else column.field.pad
    for start, end in zip(column.offsets[:-1].tolist(), column.offsets[1:].tolist(), strict=True):
        part = out[start:end]
        if start:
            np.add(part, start, out=part, where=part != pad)
    return out
