"""Handles of segments, from their manifests alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.intervals import clip, domain_ranges, gaps, restrict, subtract
from arrow_tq_schemas import handles
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.handles import Kind
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans, empty_spans

Ranges = npt.NDArray[np.int64]


def segment_handles(field: Field, manifests: Sequence[Manifest]) -> list[npt.NDArray[np.int32]]:
    """By segment, handles ``[T, 6]`` int32 of a field: rows of chunks, fill outside its domain, holes.

    All are views of one array, made without a loop over tokens. No payload is read.
    """
    pieces: list[Spans] = [empty_spans()]
    constants: list[tuple[Kind, int, int]] = []
    offset = 0
    for manifest in manifests:
        spans, fill, holes = _layout(field, manifest)
        pieces.append(_in_order([spans, _stand_ins(fill), _stand_ins(holes)]))
        constants += [(Kind.FILL, start + offset, end + offset) for start, end in fill.tolist()]
        constants += [(Kind.HOLE, start + offset, end + offset) for start, end in holes.tolist()]
        offset += manifest.num_tokens
    packed = handles.expand(np.concatenate(pieces).astype(SPAN_DTYPE, copy=False))
    for kind, start, end in constants:
        packed[start:end] = handles.constant(kind, 1)
    ends = np.cumsum([manifest.num_tokens for manifest in manifests], dtype=np.int64)
    return np.split(packed, ends[:-1]) if len(manifests) else []


def _layout(field: Field, manifest: Manifest) -> tuple[Spans, Ranges, Ranges]:
    """Spans inside the domain, ranges outside it, and holes; together they are [0, T), each once."""
    own = manifest.spans.get(field.name)
    domain = domain_ranges(field, manifest.num_tokens, manifest.sampled)
    whole = np.array([[0, manifest.num_tokens]], dtype=np.int64)
    spans = empty_spans() if own is None else restrict(clip(own, 0, manifest.num_tokens), domain)
    return spans, subtract(whole, domain), gaps(spans, domain)


def _stand_ins(ranges: Ranges) -> Spans:
    """Spans of no chunk, one a range, to be overwritten."""
    spans = np.zeros(len(ranges), dtype=SPAN_DTYPE)
    spans["start"], spans["rows"] = ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    return spans


def _in_order(parts: Sequence[Spans]) -> Spans:
    joined = np.concatenate(parts)
    return joined if len(parts[0]) == len(joined) else joined[np.argsort(joined["start"], kind="stable")]
