"""Handles: 24 bytes that stand for one token's payload while layout machinery moves tokens around.

A handle is int32[6]: [0:4] the chunk id's four big-endian words, [4] the row, [5] kind and a check of
the rest. Layout machinery promotes int32 to int64 and sums buffers to which one rank contributes:
handles survive both, and the check makes a sum of two handles an error. All zeros is padding.

[5] = kind << 24 | check, where check is 24 bits of an xorshift mix of words 0..4 and the kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans

WORDS = 6
HANDLE_BYTES = 24
BLOCK_ROWS = 1 << 14
"""Rows worked on at a time: few enough to stay in the processor's cache."""
_ROW_WORD, _SEAL_WORD = 4, 5
_Words = npt.NDArray[np.uint32]


class Kind(IntEnum):
    """What a handle stands for. 0 is kept for the all-zero padding row."""

    ROW = 1
    """A row of a chunk."""
    FILL = 2
    """A position outside the field's domain: reads as its fill."""
    HOLE = 3
    """A position that nobody wrote: an error to resolve."""


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """Handles as runs of consecutive rows of one chunk.

    Attributes:
        kinds: ``[rows]`` uint8, the kind of each handle; 0 for padding rows.
        spans: ``[runs]`` of ``SPAN_DTYPE``, in the order of the handles; ``start`` is 0.
        places: ``[runs]`` int64, index of the first handle of each run.
    """

    kinds: npt.NDArray[np.uint8]
    spans: Spans
    places: npt.NDArray[np.int64]


def expand(spans: Spans) -> npt.NDArray[np.int32]:
    """Handles ``[rows, 6]`` int32 of every row of ``spans``, in order, without a loop over tokens."""
    counts = spans["rows"].astype(np.int64)
    once = np.empty((len(spans), WORDS), dtype=np.uint32)
    once[:, 0] = spans["high"] >> np.uint64(32)
    once[:, 1] = spans["high"] & np.uint64(0xFFFFFFFF)
    once[:, 2] = spans["low"] >> np.uint64(32)
    once[:, 3] = spans["low"] & np.uint64(0xFFFFFFFF)
    # Modulo 2^32, as the sum with the row's number below is.
    once[:, _ROW_WORD] = (spans["row"].astype(np.int64) - (np.cumsum(counts) - counts)).astype(np.uint32)
    once[:, _SEAL_WORD] = _mix(once.T[:4], np.full(len(spans), _seed(Kind.ROW), np.uint32))
    out: _Words = np.repeat(once, counts, axis=0)
    numbers = np.arange(BLOCK_ROWS, dtype=np.uint32)
    for first in range(0, len(out), BLOCK_ROWS):
        block = out[first : first + BLOCK_ROWS]
        row = block[:, _ROW_WORD] + (numbers[: len(block)] + np.uint32(first & 0xFFFFFFFF))
        block[:, _ROW_WORD] = row
        block[:, _SEAL_WORD] = _sealed(_mix(row[None], block[:, _SEAL_WORD]), Kind.ROW)
    return out.view(np.int32)


def constant(kind: Kind, rows: int) -> npt.NDArray[np.int32]:
    """``rows`` equal handles that stand for no chunk (``FILL`` or ``HOLE``)."""
    out = np.zeros((rows, WORDS), dtype=np.uint32)
    seed = np.full(1, _seed(kind), np.uint32)
    out[:, _SEAL_WORD] = _sealed(_mix(np.zeros((5, 1), np.uint32), seed), kind)
    return out.view(np.int32)


def kinds(handles: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
    """The kind of each row of ``handles`` (``[rows, 6]``, int32 or wider, signed); 0 for padding rows.

    Raises:
        MalformedMessage: a row's check does not fit (two handles were added, or bytes were lost);
            names the first such row.
    """
    _check_shape(handles)
    found = np.empty(len(handles), dtype=np.uint8)
    for first in range(0, len(handles), BLOCK_ROWS):
        _, found[first : first + BLOCK_ROWS] = _read(handles, first)
    return found


def group(handles: npt.NDArray[np.integer]) -> Grouped:
    """Kinds and runs of ``handles`` (``[rows, 6]``, int32 or wider, signed), in one pass over them.

    Raises:
        MalformedMessage: as ``kinds``.
    """
    _check_shape(handles)
    found = np.empty(len(handles), dtype=np.uint8)
    heads, tails = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    last, last_is_row = np.zeros((WORDS, 1), np.uint32), False
    for first in range(0, len(handles), BLOCK_ROWS):
        words, kind = _read(handles, first)
        found[first : first + BLOCK_ROWS] = kind
        is_row = kind == Kind.ROW
        joins = _joins(np.concatenate([last, words], axis=1))
        joins &= is_row
        joins[0] &= last_is_row
        joins[1:] &= is_row[:-1]
        heads.append(np.flatnonzero(is_row & ~joins) + first)
        # A row is the last of its run where the next one does not join it.
        before = np.concatenate([[last_is_row], is_row[:-1]])
        tails.append(np.flatnonzero(before & ~joins) + first)
        last, last_is_row = words[:, -1:].copy(), bool(is_row[-1])
    if last_is_row:
        tails.append(np.array([len(handles)], np.int64))
    places, ends = np.concatenate(heads), np.concatenate(tails)
    return Grouped(found, _spans(handles[places], ends - places), places)


def _spans(firsts: npt.NDArray[np.integer], counts: npt.NDArray[np.int64]) -> Spans:
    words = firsts.astype(np.int32).view(np.uint32).astype(np.uint64)
    spans = np.zeros(len(firsts), dtype=SPAN_DTYPE)
    spans["high"] = words[:, 0] << np.uint64(32) | words[:, 1]
    spans["low"] = words[:, 2] << np.uint64(32) | words[:, 3]
    spans["row"], spans["rows"] = words[:, _ROW_WORD], counts
    return spans


def _joins(words: _Words) -> npt.NDArray[np.bool_]:
    """Whether each column of ``[6, n + 1]`` but the first is the next row of the same chunk."""
    same: npt.NDArray[np.bool_] = words[_ROW_WORD, 1:] == words[_ROW_WORD, :-1] + np.uint32(1)
    for word in range(4):
        same &= words[word, 1:] == words[word, :-1]
    return same


def _check_shape(handles: npt.NDArray[np.integer]) -> None:
    if handles.ndim != 2 or handles.shape[1] != WORDS:
        raise MalformedMessage(f"handles of shape {handles.shape}: expected [rows, {WORDS}]")
    if handles.dtype.kind != "i" or handles.dtype.itemsize < 4:
        raise MalformedMessage(f"handles of dtype {handles.dtype}: expected int32 or int64")


def _read(handles: npt.NDArray[np.integer], first: int) -> tuple[_Words, npt.NDArray[np.uint8]]:
    """The block from ``first`` as ``[6, n]`` words, and its kinds; refuses a check that does not fit."""
    block = handles[first : first + BLOCK_ROWS]
    narrow = block.T.astype(np.int32, order="C")
    words = narrow.view(np.uint32)
    top = words[_SEAL_WORD] >> np.uint32(24)
    seal = _sealed(_mix(words[:5], np.uint32(0x9E3779B9) ^ top << np.uint32(24)), top)
    bad = words[_SEAL_WORD] != seal
    bad |= (top - np.uint32(1)) > np.uint32(2)
    if bad.any():
        bad &= words.any(axis=0)
    if block.dtype != np.int32:
        bad |= (narrow != block.T).any(axis=0)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise MalformedMessage(
            f"handle at row {first + at}: its check does not fit {block[at].tolist()} "
            "(were two handles added, or bits lost?)",
            row=first + at,
        )
    return words, top.astype(np.uint8)


def _seed(kind: int) -> np.uint32:
    return np.uint32(0x9E3779B9 ^ kind << 24)


def _mix(words: _Words, mix: _Words) -> _Words:
    """The running mix after some words more, each ``[n]``."""
    for word in words:
        mix = (mix ^ word) * np.uint32(0x85EBCA6B)
        mix ^= mix >> np.uint32(13)
    return mix


def _sealed(mix: _Words, kind: int | _Words) -> _Words:
    return (mix & np.uint32(0xFFFFFF)) | np.asarray(kind, dtype=np.uint32) << np.uint32(24)
