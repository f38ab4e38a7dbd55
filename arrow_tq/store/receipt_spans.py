"""Receipts as spans: the chunks of some steps, field by field, without an object a span. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import NotFound
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.manifests import OWNED_DTYPE, ranges
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans

FEW = 64
"""Spans up to which a set is faster than sorting arrays."""


class Written(Protocol):
    """A step, as far as what it wrote goes."""

    @property
    def step_id(self) -> str: ...

    @property
    def receipts(self) -> Sequence[Receipt]: ...


def chunks_by_field(steps: Iterable[Written], declared: Mapping[str, Field]) -> dict[str, list[StoredChunk]]:
    """Each field's chunks in the order in which they were written."""
    chunks: dict[str, list[StoredChunk]] = {name: [] for name in declared}
    for step in steps:
        for receipt in step.receipts:
            if receipt.field not in chunks:
                raise NotFound(
                    f"step {step.step_id!r}: field {receipt.field!r} is not among {', '.join(declared)}",
                    field=receipt.field,
                )
            chunks[receipt.field].extend(receipt.chunks)
    return chunks


def whole_spans(chunks: Sequence[StoredChunk]) -> Spans:
    """One span a chunk, null rows and all."""
    count = len(chunks)
    spans = np.empty(count, dtype=SPAN_DTYPE)
    halves = np.frombuffer(bytes.fromhex("".join(map(attrgetter("id"), chunks))), dtype=">u8")
    spans["high"], spans["low"] = halves[0::2], halves[1::2]
    spans["start"] = np.fromiter(map(attrgetter("start"), chunks), np.int64, count)
    spans["rows"] = np.fromiter(map(attrgetter("rows"), chunks), np.int64, count)
    spans["row"] = 0
    return spans


def valid_runs(spans: Spans, chunks: Sequence[StoredChunk]) -> Spans:
    """One span a run of rows that are not null: ``StoredChunk.spans`` without an object a span."""
    holed = [index for index, runs in enumerate(map(attrgetter("valid"), chunks)) if runs is not None]
    if not holed:
        return spans
    counts = np.ones(len(chunks), dtype=np.int64)
    counts[holed] = [len(chunks[index].valid or ()) for index in holed]
    chosen = np.zeros(len(chunks), dtype=np.bool_)
    chosen[holed] = True
    split = np.repeat(spans, counts)
    inside = np.repeat(chosen, counts)
    runs = ranges([run for index in holed for run in chunks[index].valid or ()])
    split["row"][inside] = runs[:, 0]
    split["rows"][inside] = runs[:, 1] - runs[:, 0]
    split["start"][inside] += runs[:, 0]
    return split


def joined(parts: Sequence[Spans]) -> Spans:
    """Spans one after the other; perhaps a part itself. Numpy would compare their types, slowly."""
    some = [part for part in parts if len(part)]
    if len(some) < 2:
        return some[0] if some else parts[0]
    return np.concatenate(some)


def owned_ids(spans: Sequence[Spans]) -> npt.NDArray[np.void]:
    """Distinct chunk ids of these spans, ascending."""
    if sum(map(len, spans)) <= FEW:
        pairs = {
            pair for part in spans for pair in zip(part["high"].tolist(), part["low"].tolist(), strict=True)
        }
        return np.array(sorted(pairs), dtype=OWNED_DTYPE)
    ids = np.empty(sum(len(part) for part in spans), dtype=OWNED_DTYPE)
    for half in ("high", "low"):
        ids[half] = np.concatenate([np.empty(0, "<u8"), *[part[half] for part in spans]])
    high, low = ids["high"], ids["low"]
    if ((high[1:] < high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] < low[:-1]))).any():
        ids = ids[np.lexsort((low, high))]
    distinct = np.ones(len(ids), dtype=np.bool_)
    distinct[1:] = (ids["high"][1:] != ids["high"][:-1]) | (ids["low"][1:] != ids["low"][:-1])
    return ids[distinct]
