"""The segment of a plain session: few steps, one after the other, none of which writes over another. Pure.

Most sessions are that, and numpy takes longer to begin than their few spans take in Python. What is not plain
is for ``compose``, which gives the same where both can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.manifests import OWNED_DTYPE, Manifest, ranges
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans

STEPS_MAX = 32
CHUNKS_MAX = 128
_LOW = (1 << 64) - 1
Pairs = list[tuple[int, int]]
Parts = list[tuple[int, int, int, int]]
"""Start, chunk id, row, rows."""


class Step(Protocol):
    """As ``compose.TreeStep``."""

    @property
    def parent(self) -> int: ...

    @property
    def sampled(self) -> tuple[int, int] | None: ...

    @property
    def version(self) -> str | None: ...

    @property
    def rewrite_at(self) -> int | None: ...

    @property
    def cut(self) -> str | None: ...

    @property
    def receipts(self) -> Sequence[Receipt]: ...


class _Written:
    """What the steps wrote and sampled so far."""

    def __init__(self, declared: Mapping[str, Field]) -> None:
        self._declared = declared
        self.parts: dict[str, Parts] = {name: [] for name in declared}
        self.end = 0
        self.sampled: Pairs = []
        self.by_version: dict[str, Pairs] = {}
        self._ends = dict.fromkeys(declared, 0)

    def add(self, step: Step) -> bool:
        """Whether the step only adds: rows behind those of before, none of them null."""
        return all(self._add(receipt) for receipt in step.receipts) and self._sample(step)

    def _add(self, receipt: Receipt) -> bool:
        name = receipt.field
        if name not in self.parts:
            return False
        parts, last = self.parts[name], self._ends[name]
        for chunk in receipt.chunks:
            if chunk.valid is not None or chunk.start < last:
                return False
            parts.append((chunk.start, int(chunk.id, 16), 0, chunk.rows))
            last = chunk.start + chunk.rows
        self._ends[name] = last
        if receipt.rows and self._declared[name].domain != "forwarded":
            self.end = max(self.end, receipt.end)
        return True

    def _sample(self, step: Step) -> bool:
        if step.sampled is None:
            return True
        start, end = (min(edge, self.end) for edge in step.sampled)
        if start >= end:
            return True
        if self.sampled and start < self.sampled[-1][1]:
            return False
        _append(self.sampled, start, end)
        if step.version is not None:
            _append(self.by_version.setdefault(step.version, []), start, end)
        return True


def plain_segment(
    steps: Sequence[Step], declared: Mapping[str, Field], segment_id: str
) -> tuple[Manifest, tuple[str, ...]] | None:
    """The manifest of a session's one segment, in any view, and its complete fields.

    None where the steps branch, rewrite, overlap or are many.
    """
    if not 0 < len(steps) <= STEPS_MAX:
        return None
    written = _Written(declared)
    for index, step in enumerate(steps):
        if step.parent != index - 1 or step.cut is not None or step.rewrite_at is not None:
            return None
        if not written.add(step):
            return None
    if sum(map(len, written.parts.values())) > CHUNKS_MAX:
        return None
    spans: dict[str, Spans] = {}
    complete: list[str] = []
    for name, field in declared.items():
        domain = _domain(field, written)
        shown = _clip(written.parts[name], domain)
        spans[name] = _to_spans(shown)
        if sum(rows for _, _, _, rows in shown) == sum(end - start for start, end in domain):
            complete.append(name)
    ids = sorted({chunk for parts in written.parts.values() for _, chunk, _, _ in parts})
    owned = np.array([(chunk >> 64, chunk & _LOW) for chunk in ids], dtype=OWNED_DTYPE)
    sampled = ranges(written.sampled)
    versions = sorted((*pair, version) for version, pairs in written.by_version.items() for pair in pairs)
    return Manifest(segment_id, written.end, spans, sampled, sampled, owned, tuple(versions)), tuple(complete)


def _domain(field: Field, written: _Written) -> Pairs:
    """As ``intervals.domain_ranges``."""
    if field.domain == "sampled":
        return written.sampled
    end = written.end - 1 if field.domain == "forwarded" else written.end
    return [(0, end)] if end > 0 else []


def _clip(parts: Parts, domain: Pairs) -> Parts:
    """The parts inside the domain: both ascend."""
    if len(domain) == 1 and parts:
        (start, end), last = domain[0], parts[-1]
        if start <= parts[0][0] and last[0] + last[3] <= end:
            return parts
    return [
        (low, chunk, row + low - first, high - low)
        for first, chunk, row, rows in parts
        for start, end in domain
        if (low := max(first, start)) < (high := min(first + rows, end))
    ]


def _to_spans(parts: Parts) -> Spans:
    return np.array(
        [(start, chunk >> 64, chunk & _LOW, row, rows) for start, chunk, row, rows in parts], dtype=SPAN_DTYPE
    )


def _append(pairs: Pairs, start: int, end: int) -> None:
    """At the end of ascending ranges; those that touch are one."""
    if pairs and pairs[-1][1] == start:
        pairs[-1] = (pairs[-1][0], end)
    else:
        pairs.append((start, end))
