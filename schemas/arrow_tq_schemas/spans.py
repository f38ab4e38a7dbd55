"""Spans: parts of chunks, as numpy structured rows so that millions of them cost no Python each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.ids import ChunkId

SPAN_DTYPE = np.dtype([("start", "<i8"), ("high", "<u8"), ("low", "<u8"), ("row", "<u4"), ("rows", "<u4")])
"""start: absolute position of the first row; high, low: halves of the chunk id (group 0); row: first row
inside the chunk; rows: how many. 32 bytes a span."""

Spans = npt.NDArray[np.void]
_LOW = (1 << 64) - 1


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One span, for people and tests; hot paths use arrays of ``SPAN_DTYPE``."""

    start: int
    chunk_id: ChunkId
    row: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows


def to_spans(values: Iterable[Span]) -> Spans:
    """Spans as an array of ``SPAN_DTYPE``."""
    rows = [
        (span.start, span.chunk_id.value >> 64, span.chunk_id.value & _LOW, span.row, span.rows)
        for span in values
    ]
    return np.array(rows, dtype=SPAN_DTYPE)


def from_spans(spans: Spans) -> list[Span]:
    """The other way round."""
    return [
        Span(start, ChunkId(high << 64 | low), row, rows) for start, high, low, row, rows in spans.tolist()
    ]


def chunk_ids(spans: Spans) -> list[ChunkId]:
    """The chunk id of each span, in order (with repeats)."""
    return [
        ChunkId(high << 64 | low)
        for high, low in zip(spans["high"].tolist(), spans["low"].tolist(), strict=True)
    ]


def empty_spans() -> Spans:
    """No spans: ``[0]`` of ``SPAN_DTYPE``."""
    return np.empty(0, dtype=SPAN_DTYPE)
