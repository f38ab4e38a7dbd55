"""What a fetch gives: one column a field, each segment a view of one packed buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.trainer.versions import Versions
from arrow_tq_schemas.errors import Conflict, NotFound
from arrow_tq_schemas.fields import Field

if TYPE_CHECKING:
    import torch


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
    def nbytes(self) -> int:
        return self.packed.nbytes


class Data(Mapping[str, Column]):
    """A fetch's answer: ``data[field][i]`` is segment i's array of that field.

    ``bfloat16`` fields are their bits as uint16 (numpy has no such type); ``tensor`` gives the real thing.

    Attributes:
        offsets: ``[segments + 1]`` int64, where each segment's T tokens begin in a packed buffer.
        versions: which weight version sampled each token: ``data.versions[i]`` is segment i's ``[T]`` int32
            of places in ``data.versions.names``, -1 for a token that was not sampled. Needs no field.
    """

    def __init__(
        self, columns: Mapping[str, Column], offsets: npt.NDArray[np.int64], versions: Versions
    ) -> None:
        self._columns: dict[str, Column] | None = dict(columns)
        self.offsets = offsets
        self.versions = versions

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

    def tensor(self, field: str, dtype: str | None = None) -> torch.Tensor:
        """The packed column as a torch tensor ``[sum of T, *item]``, widened to ``dtype`` if asked.

        Shares memory with the column where the dtype allows. uint16 is widened to int32 (torch's own
        uint16 lacks most operations).
        """
        from arrow_tq import tensors

        column = self[field]
        return tensors.from_storage(column.packed, column.field.dtype, dtype)

    def close(self) -> None:
        """Let go of the buffers. Views that were taken stay valid."""
        self._columns = None

    def _open(self) -> dict[str, Column]:
        if self._columns is None:
            raise Conflict("this data was closed: fetch again")
        return self._columns
