"""What training frameworks do to per-token rows before a layer sees them: the tests' oracle for handles.

Each function moves rows of ``[tokens, ...]`` and never looks inside them, so it does to handles what it
does to payload. Written plainly, row ranges and nothing clever: what a test compares must be easier to
believe than what it tests. Layouts follow what Megatron and slime do (zig-zag chunks ``r`` and
``2 * size - 1 - r`` of a sequence for context-parallel rank ``r``), as described in their documentation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.generic]


def pack(samples: Sequence[Rows]) -> Rows:
    """``[sum of T, ...]`` from one array a sample."""
    return np.concatenate(samples)


def unpack(packed: Rows, lengths: Sequence[int]) -> list[Rows]:
    """One array a sample again."""
    return list(np.split(packed, np.cumsum(lengths)[:-1]))


def pad_to(rows: Rows, length: int, value: float | Rows = 0) -> Rows:
    """Rows up to ``length``, each new one ``value``."""
    out = np.empty((length, *rows.shape[1:]), rows.dtype)
    out[: len(rows)], out[len(rows) :] = rows, value
    return out


def pad_multiple(rows: Rows, multiple: int, value: float | Rows = 0) -> Rows:
    """Rows up to the next multiple (of the tensor-parallel size, say)."""
    return pad_to(rows, len(rows) + -len(rows) % multiple, value)


def contiguous(rows: Rows, rank: int, size: int) -> Rows:
    """Part ``rank`` of ``size`` equal ones: a contiguous context-parallel or a sequence-parallel slice."""
    part = len(rows) // size
    return rows[rank * part : (rank + 1) * part]


def zigzag(rows: Rows, rank: int, size: int) -> Rows:
    """Chunks ``rank`` and ``2 * size - 1 - rank`` of ``2 * size``: like work for causal attention."""
    part = len(rows) // (2 * size)
    late = 2 * size - 1 - rank
    return np.concatenate([rows[rank * part : (rank + 1) * part], rows[late * part : (late + 1) * part]])


def zigzag_join(parts: Sequence[Rows]) -> Rows:
    """The whole from every rank's ``zigzag`` part: what an all_gather and a reorder give."""
    halves = [np.split(part, 2) for part in parts]
    return np.concatenate([*(first for first, _ in halves), *(second for _, second in reversed(halves))])


def single_writer_sum(parts: Sequence[Rows], total: int) -> Rows:
    """What an all_reduce(SUM) gives where each rank writes rows of its own into zeros (int64)."""
    out = np.zeros((total, *parts[0].shape[1:]), np.int64)
    offset = 0
    for part in parts:
        mine = np.zeros_like(out)
        mine[offset : offset + len(part)] = part
        out += mine
        offset += len(part)
    return out
