"""Manifests: a segment's spans, field by field, in token order, plus every chunk that it owns.

Encoding, version 1: the magic ``ATQM``, u8 version, u32 length of the JSON head, the head, then a zlib
stream of columns. The head names T, the fields with their span counts, and the number of owned chunks.
Columns are concatenated: for the spans of all fields start, high, low, row, rows; then owned high, low
(each little-endian u64, delta-coded modulo 2^64, bytes transposed so that equal high bytes are
neighbours). Consecutive chunks of one writer differ in few bits, which is what makes this small.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans

MAGIC = b"ATQM"
VERSION = 1
SPANS_MAX = 1 << 24
_HEAD = struct.Struct("<4sBI")
_UNREADABLE = (
    *(struct.error, zlib.error, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)
SMALL_BYTES = 1024
FEW = 32
"""Records up to which numpy takes longer to begin than they take in Python."""
_MASK = (1 << 64) - 1
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_BITS = {"start": 48, "row": 32, "rows": 32}
OWNED_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8")])


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """What a segment is made of.

    Args:
        segment_id: the segment.
        num_tokens: T, the largest end over ``all`` and ``sampled`` fields.
        spans: by field, arrays of ``SPAN_DTYPE``: ascending, not overlapping; gaps are fill or holes.
        sampled: ``[n, 2]`` int64 half-open ranges of positions sampled in the segment's path; where
            ``sampled`` fields have their domain.
        loss: ``[n, 2]`` int64 ranges of the sampled tokens that carry loss in this segment.
        owned: ``OWNED_DTYPE`` ids (layer group 0) of every chunk kept alive by the segment.
        versions: (start, end, version) of the sampled tokens whose weight version is known, ascending.
    """

    segment_id: str
    num_tokens: int
    spans: Mapping[str, Spans]
    sampled: npt.NDArray[np.int64]
    loss: npt.NDArray[np.int64]
    owned: npt.NDArray[np.void]
    versions: Sequence[tuple[int, int, str]] = ()

    def encode(self) -> bytes:
        head, columns = self.parts()
        return _HEAD.pack(MAGIC, VERSION, len(head)) + head + _deflate(columns)

    def parts(self) -> tuple[bytes, bytes]:
        """The JSON head and the columns before compression: what the golden bytes freeze."""
        values: dict[str, object] = {
            "segment_id": self.segment_id,
            "num_tokens": self.num_tokens,
            "fields": {name: len(spans) for name, spans in self.spans.items()},
            "sampled": self.sampled.tolist(),
            "loss": self.loss.tolist(),
            "owned": len(self.owned),
        }
        if self.versions:
            values["versions"] = [list(one) for one in self.versions]
        head = _to_json(values).encode()
        columns = _pack(list(self.spans.values()), ("start", "high", "low", "row", "rows"))
        return head, columns + _pack([self.owned], ("high", "low"))

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises ``MalformedMessage`` for bytes of another version, cut, or that lie about sizes."""
        try:
            return cls._decode(raw)
        except _UNREADABLE as error:
            if isinstance(error, MalformedMessage):
                raise
            raise MalformedMessage(f"manifest of {len(raw)} bytes: {error}") from None

    @classmethod
    def _decode(cls, raw: bytes) -> Manifest:
        magic, version, length = _HEAD.unpack_from(raw)
        if magic != MAGIC or version != VERSION:
            raise MalformedMessage(
                f"manifest: magic {magic!r} version {version}, expected {MAGIC!r} {VERSION}"
            )
        head = json.loads(raw[_HEAD.size : _HEAD.size + length])
        counts = {str(name): int(count) for name, count in head["fields"].items()}
        total, owned_count = sum(counts.values()), int(head["owned"])
        if min([0, owned_count, *counts.values()]) < 0 or total + owned_count > SPANS_MAX:
            raise MalformedMessage(f"manifest: {total} spans, {owned_count} owned: at most {SPANS_MAX}")
        size = 8 * (5 * total + 2 * owned_count)
        inflate = zlib.decompressobj()
        columns = inflate.decompress(raw[_HEAD.size + length :], size + 1)
        if len(columns) != size or not inflate.eof or inflate.unused_data:
            raise MalformedMessage(
                f"manifest: columns of {len(columns)} bytes, expected {size} and nothing after them"
            )
        spans = np.empty(total, SPAN_DTYPE)
        for index, name in enumerate(("start", "high", "low", "row", "rows")):
            column = _unpack(columns[8 * total * index : 8 * total * (index + 1)])
            if name in _BITS and total and column.max() >> np.uint64(_BITS[name]):
                raise MalformedMessage(f"manifest: {name} {column.max()} is more than {_BITS[name]} bits")
            spans[name] = column
        owned = np.empty(owned_count, OWNED_DTYPE)
        rest = columns[40 * total :]
        owned["high"] = _unpack(rest[: 8 * owned_count])
        owned["low"] = _unpack(rest[8 * owned_count :])
        ends = np.cumsum(list(counts.values()), dtype=np.int64)
        by_field = dict(zip(counts, np.split(spans, ends[:-1]) if counts else [], strict=True))
        return cls(
            str(head["segment_id"]),
            int(head["num_tokens"]),
            by_field,
            ranges(head["sampled"]),
            ranges(head["loss"]),
            owned,
            tuple((int(start), int(end), str(name)) for start, end, name in head.get("versions", ())),
        )


def ranges(pairs: object) -> npt.NDArray[np.int64]:
    """``[n, 2]`` int64 from a list of half-open ranges, ``[0, 2]`` for none."""
    return np.asarray(pairs, dtype=np.int64).reshape(-1, 2)


def _pack(parts: Sequence[npt.NDArray[np.void]], names: Sequence[str]) -> bytes:
    """Some columns of records, one after the other: all at once, as most manifests have few spans.

    Numpy joins records in Python, comparing their types: columns are joined here instead.
    """
    count = sum(map(len, parts))
    if count <= FEW:
        rows = [row for part in parts for row in part.tolist()]
        return b"".join(map(_pack_few, zip(*rows, strict=True))) if rows else b""
    delta = np.zeros((len(names), count), "<u8")
    first = 0
    for part in parts:
        if len(part):
            for place, name in enumerate(names):
                delta[place, first : first + len(part)] = part[name]
            first += len(part)
    delta[:, 1:] -= delta[:, :-1].copy()
    return delta.view(np.uint8).reshape(len(names), count, 8).transpose(0, 2, 1).tobytes()


def _pack_few(values: Sequence[int]) -> bytes:
    """One column of ``_pack``."""
    if len(values) == 1:
        # One byte after the other, as below.
        return (values[0] & _MASK).to_bytes(8, "little")
    before = (0, *values)
    raw = struct.pack(
        f"<{len(values)}Q", *[(new - old) & _MASK for new, old in zip(values, before, strict=False)]
    )
    return b"".join([raw[place::8] for place in range(8)])


def _deflate(columns: bytes) -> bytes:
    """A zlib stream; a few spans get by with small tables, which cost more to make than to use."""
    small = len(columns) <= SMALL_BYTES
    squeeze = zlib.compressobj(6, zlib.DEFLATED, 10, 2) if small else zlib.compressobj(6)
    return squeeze.compress(columns) + squeeze.flush()


def _unpack(raw: bytes) -> npt.NDArray[np.uint64]:
    delta = np.frombuffer(raw, np.uint8).reshape(8, -1).T.copy().view("<u8").reshape(-1)
    return np.cumsum(delta, dtype=np.uint64)
