"""Handles: 24 bytes that stand for one token's payload while layout machinery moves tokens around.

A handle is int32[6]: [0:4] the chunk id's four big-endian words, [4] the row, [5] kind and a check of
the rest. Layout machinery promotes int32 to int64 and sums buffers to which one rank contributes:
handles survive both, and the check makes a sum of two handles an error. All zeros is padding.

[5] = kind << 24 | check, where check is 24 bits of an xorshift mix of words 0..4 and the kind.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.spans import Spans

WORDS = 6
HANDLE_BYTES = 24


class Kind(IntEnum):
    """What a handle stands for. 0 is kept for the all-zero padding row."""

    ROW = 1
    """A row of a chunk."""
    FILL = 2
    """A position outside the field's domain: reads as its fill."""
    HOLE = 3
    """A position that nobody wrote: an error to resolve."""


def expand(spans: Spans) -> npt.NDArray[np.int32]:
    """Handles ``[rows, 6]`` int32 of every row of ``spans``, in order, without a loop over tokens."""
    counts = spans["rows"].astype(np.int64)
    total = int(counts.sum())
    words = np.empty((len(spans), 4), dtype=np.uint32)
    words[:, 0] = spans["high"] >> np.uint64(32)
    words[:, 1] = spans["high"] & np.uint64(0xFFFFFFFF)
    words[:, 2] = spans["low"] >> np.uint64(32)
    words[:, 3] = spans["low"] & np.uint64(0xFFFFFFFF)
    firsts = np.cumsum(counts) - counts
    out = np.empty((total, WORDS), dtype=np.uint32)
    out[:, :4] = np.repeat(words, counts, axis=0)
    out[:, 4] = np.arange(total) + np.repeat(spans["row"].astype(np.int64) - firsts, counts)
    out[:, 5] = _seal(out, Kind.ROW)
    return out.view(np.int32)


def constant(kind: Kind, rows: int) -> npt.NDArray[np.int32]:
    """``rows`` equal handles that stand for no chunk (``FILL`` or ``HOLE``)."""
    out = np.zeros((rows, WORDS), dtype=np.uint32)
    out[:, 5] = _seal(out, kind)
    return out.view(np.int32)


def kinds(handles: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
    """The kind of each row of ``handles`` (``[rows, 6]``, int32 or wider, signed); 0 for padding rows.

    Raises:
        MalformedMessage: a row's check does not fit (two handles were added, or bytes were lost);
            names the first such row.
    """
    if handles.ndim != 2 or handles.shape[1] != WORDS:
        raise MalformedMessage(f"handles of shape {handles.shape}: expected [rows, {WORDS}]")
    words = handles.astype(np.int32).view(np.uint32)
    kind = (words[:, 5] >> np.uint32(24)).astype(np.uint8)
    padding = ~words.any(axis=1)
    bad = (words[:, 5] != _seal(words, kind)) & ~padding
    bad |= ~np.isin(kind, [*Kind]) & ~padding
    bad |= (handles != handles.astype(np.int32)).any(axis=1)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise MalformedMessage(
            f"handle at row {first}: its check does not fit {handles[first].tolist()} "
            "(were two handles added, or bits lost?)"
        )
    return kind


def _seal(words: npt.NDArray[np.uint32], kind: int | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    top = np.asarray(kind, dtype=np.uint32) << np.uint32(24)
    mix = np.full(len(words), 0x9E3779B9, dtype=np.uint32) ^ top
    for column in range(5):
        mix = (mix ^ words[:, column]) * np.uint32(0x85EBCA6B)
        mix ^= mix >> np.uint32(13)
    return top | (mix & np.uint32(0xFFFFFF))
