"""Which rows of a packed micro-batch one rank's routers see, and in what order.

Context parallelism cuts each sequence, sequence parallelism cuts what is left; both pad first. Replayed
routing must go through the same cuts as the tokens, or every row after the first pad is another token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import InvalidInput

Index = npt.NDArray[np.int64]
PAD = -1
"""Marks a row that no recorded token stands behind."""


class ContextSplit(Enum):
    """How context-parallel ranks share tokens."""

    ZIGZAG = "zigzag"
    """Each sequence in 2 x size pieces; rank r has piece r and piece 2 x size - 1 - r."""
    CONTIGUOUS = "contiguous"
    """Each sequence in 2 x size pieces; rank r has the two neighbours 2r and 2r + 1."""
    PACKED = "packed"
    """Sequences are packed first, then cut in ``size`` equal parts."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank's place.

    Args:
        context: how ``cp_size`` ranks share tokens.
        cp_rank, cp_size: context parallelism.
        sp_rank, sp_size: sequence parallelism: the tensor-parallel rank and size where it is on, else 0 of 1.
        sample_multiple: each sequence is padded to a multiple of this before it is cut.
        row_multiple: what is left after the context cut is padded to a multiple of this.
        sequence_rows: every sequence is padded to this many rows (``bshd``); None where they are packed.

    Raises:
        InvalidInput: a rank outside its size, a count below 1, or rows that ``sp_size`` does not divide.
    """

    context: ContextSplit = ContextSplit.ZIGZAG
    cp_rank: int = 0
    cp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    sample_multiple: int = 1
    row_multiple: int = 1
    sequence_rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.context, ContextSplit):
            raise InvalidInput(f"context {self.context!r}: expected a ContextSplit")
        for label in ("cp", "sp"):
            rank, size = getattr(self, f"{label}_rank"), getattr(self, f"{label}_size")
            if not 0 <= rank < size:
                raise InvalidInput(f"{label}_rank {rank}: expected 0 to {label}_size - 1 = {size - 1}")
        if self.sample_multiple < 1 or self.row_multiple < 1:
            raise InvalidInput("sample_multiple and row_multiple: expected 1 or more")

    def index(self, lengths: Sequence[int] | Index) -> Index:
        """For each row of this rank, its place in the packed tokens; ``PAD`` where there is none.

        Args:
            lengths: T of each sequence. The last token of each was never forwarded by the rollout engine,
                so its row is padding too: its output is the prediction of a token that nobody has.
        """
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        whole = [
            self._padded(int(start), int(length)) for start, length in zip(starts[:-1], lengths, strict=True)
        ]
        if self.context is ContextSplit.PACKED:
            rows = _fill(np.concatenate([*whole, _nothing()]), self.cp_size * self.row_multiple)
            part = len(rows) // self.cp_size
            rows = rows[part * self.cp_rank : part * (self.cp_rank + 1)]
        else:
            rows = np.concatenate([*(self._cut(one) for one in whole), _nothing()])
            rows = _fill(rows, self.row_multiple)
        if len(rows) % self.sp_size:
            raise InvalidInput(
                f"{len(rows)} rows are not divided by sp_size {self.sp_size}: row_multiple "
                f"{self.row_multiple} must be a multiple of it"
            )
        part = len(rows) // self.sp_size
        return rows[part * self.sp_rank : part * (self.sp_rank + 1)]

    def rows(self, lengths: Sequence[int] | Index) -> int:
        """How many rows this rank has."""
        return len(self.index(lengths))

    def _padded(self, start: int, length: int) -> Index:
        width = length if self.sequence_rows is None else self.sequence_rows
        if length > width:
            raise InvalidInput(f"a sequence of {length} tokens: sequence_rows is {width}")
        rows = np.full(-(-width // self.sample_multiple) * self.sample_multiple, PAD, np.int64)
        if length > 1:
            rows[: length - 1] = np.arange(start, start + length - 1)
        return rows

    def _cut(self, rows: Index) -> Index:
        if self.cp_size == 1:
            return rows
        rows = _fill(rows, 2 * self.cp_size)
        pieces = rows.reshape(2 * self.cp_size, -1)
        mirror = 2 * self.cp_size - 1 - self.cp_rank
        chosen = (self.cp_rank, mirror)
        if self.context is ContextSplit.CONTIGUOUS:
            chosen = (2 * self.cp_rank, 2 * self.cp_rank + 1)
        return np.concatenate([pieces[chosen[0]], pieces[chosen[1]]])


def _fill(rows: Index, multiple: int) -> Index:
    missing = -len(rows) % multiple
    return rows if not missing else np.concatenate([rows, np.full(missing, PAD, np.int64)])


def _nothing() -> Index:
    return np.empty(0, np.int64)
