"""Memory as it was read: consecutive rows of one buffer, each piece with the rows that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arrow_tq.bundles.plans import Bytes
from arrow_tq.bundles.selection import Part


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows ``[first, first + rows)`` of a field, back to back in ``memory`` (read-only)."""

    first: int
    rows: int
    memory: Bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[offset, offset + nbytes)`` of a chunk."""

    chunk: int
    offset: int
    nbytes: int


Fetch = Callable[[Sequence[Span]], Sequence[Bytes]]
"""Reads spans: one array for each, in their order."""


def read_pieces(
    wanted: Mapping[object, Sequence[Part]], fetch: Fetch, span_bytes: int | None
) -> dict[object, list[Piece]]:
    """Read the blocks of many buffers at once; gives the pieces by buffer.

    Blocks that follow each other are read as one, up to ``span_bytes`` (None: without a bound). The blocks
    of a row that was cut are put together, the only place where reading copies.
    """
    spans: list[Span] = []
    places: dict[object, list[tuple[Piece, int]]] = {}
    for name, parts in wanted.items():
        merged = _merged(parts, span_bytes)
        places[name] = [(piece, len(spans) + index) for index, (piece, _) in enumerate(merged)]
        spans += [span for _, span in merged]
    memories = iter(fetch([span for span in spans if span.nbytes]))
    arrays = [next(memories) if span.nbytes else _EMPTY for span in spans]
    return {
        name: _joined([Piece(piece.first, piece.rows, arrays[number]) for piece, number in found])
        for name, found in places.items()
    }


_EMPTY: Bytes = np.empty(0, np.uint8)
_EMPTY.flags.writeable = False


def _merged(parts: Sequence[Part], span_bytes: int | None) -> list[tuple[Piece, Span]]:
    merged: list[tuple[Piece, Span]] = []
    for part in parts:
        block = part.block
        if merged and block.rows:
            piece, span = merged[-1]
            follows = part.first == piece.first + piece.rows and piece.rows
            together = block.chunk == span.chunk and (
                block.offset == span.offset + span.nbytes or not block.nbytes
            )
            if follows and together and (span_bytes is None or span.nbytes + block.nbytes <= span_bytes):
                merged[-1] = (
                    Piece(piece.first, piece.rows + block.rows, _EMPTY),
                    Span(span.chunk, span.offset, span.nbytes + block.nbytes),
                )
                continue
        merged.append((Piece(part.first, block.rows, _EMPTY), Span(block.chunk, block.offset, block.nbytes)))
    return merged


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Put the rest of a cut row behind its first block."""
    whole: list[list[Piece]] = []
    for piece in pieces:
        if piece.rows or not whole:
            whole.append([piece])
        else:
            whole[-1].append(piece)
    return [group[0] if len(group) == 1 else _concatenated(group) for group in whole]


def _concatenated(group: Sequence[Piece]) -> Piece:
    memory = np.concatenate([piece.memory for piece in group])
    memory.flags.writeable = False
    return Piece(group[0].first, group[0].rows, memory)
