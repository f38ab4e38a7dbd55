"""Values of the contract come back equal from their encodings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq_schemas import handles, tickets
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import OWNED_DTYPE, Manifest, ranges
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.spans import Span, from_spans, to_spans

ids = st.builds(
    ChunkId.make,
    st.integers(0, (1 << 48) - 1),
    st.integers(0, (1 << 12) - 1),
    st.integers(0, 255),
    st.integers(0, (1 << 54) - 1),
)
spans = st.lists(
    st.builds(
        Span, st.integers(0, 1 << 47), ids, st.integers(0, (1 << 32) - 1), st.integers(1, (1 << 32) - 1)
    ),
    max_size=20,
)
pairs = st.lists(st.tuples(st.integers(0, 1 << 47), st.integers(0, 1 << 47)), max_size=5)


@settings(deadline=None)
@given(ids, st.integers(0, 255))
def test_ids(value: ChunkId, group: int) -> None:
    assert ChunkId.from_bytes(value.to_bytes()) == ChunkId.from_hex(value.hex) == value
    remade = ChunkId.make(value.time_ms, value.shard, value.group, value.value & (1 << 54) - 1)
    assert remade == value
    sibling = value.sibling(group)
    assert (sibling.time_ms, sibling.shard, sibling.group) == (value.time_ms, value.shard, group)
    assert sibling.sibling(value.group) == value


@settings(deadline=None)
@given(spans)
def test_spans(values: list[Span]) -> None:
    packed = to_spans(values)
    assert from_spans(packed) == values
    assert from_spans(tickets.unpack_spans(tickets.pack_spans(packed))) == values


@settings(deadline=None)
@given(
    st.text(max_size=20).filter(lambda text: text.isprintable()),
    st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), spans, max_size=4),
    pairs,
    pairs,
    st.lists(ids, max_size=10),
)
def test_manifests(
    segment_id: str,
    by_field: dict[str, list[Span]],
    sampled: list[tuple[int, int]],
    loss: list[tuple[int, int]],
    owned: list[ChunkId],
) -> None:
    halves = [(value.value >> 64, value.value & (1 << 64) - 1) for value in owned]
    manifest = Manifest(
        segment_id,
        12345,
        {name: to_spans(values) for name, values in by_field.items()},
        ranges(sampled),
        ranges(loss),
        np.array(halves, OWNED_DTYPE),
    )
    back = Manifest.decode(manifest.encode())
    assert (back.segment_id, back.num_tokens) == (segment_id, 12345)
    assert {name: from_spans(values) for name, values in back.spans.items()} == by_field
    assert back.sampled.tolist() == [list(pair) for pair in sampled]
    assert back.loss.tolist() == [list(pair) for pair in loss]
    assert back.owned.tolist() == halves
    assert back.parts() == manifest.parts()


@settings(deadline=None)
@given(st.lists(st.builds(Span, st.just(0), ids, st.integers(0, 1 << 20), st.integers(1, 50)), max_size=8))
def test_handles(values: list[Span]) -> None:
    made = handles.expand(to_spans(values))
    assert handles.kinds(made).tolist() == [handles.Kind.ROW] * sum(span.rows for span in values)
    wide = made.astype(np.int64)
    assert handles.kinds(wide).tolist() == handles.kinds(made).tolist()
    named = [(span.chunk_id, span.row + offset) for span in values for offset in range(span.rows)]
    assert [(ChunkId.from_bytes(row[:4].astype(">i4").tobytes()), int(row[4])) for row in wide] == named


@settings(deadline=None)
@given(ids, ids, st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.sampled_from([np.int32, np.int64]))
def test_two_handles_added_are_refused(
    one: ChunkId, other: ChunkId, row: int, place: int, dtype: type[np.signedinteger]
) -> None:
    first = handles.expand(to_spans([Span(0, one, row, 1)])).astype(dtype)
    second = handles.expand(to_spans([Span(0, other, place, 1)])).astype(dtype)
    with pytest.raises(MalformedMessage, match=r"handle at row 0: its check does not fit"):
        handles.kinds(first + second)


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    start = position = draw(st.integers(0, 1 << 40))
    chunks = []
    for rows in draw(st.lists(st.integers(1, 12), max_size=5)):
        edges = sorted(draw(st.sets(st.integers(0, rows), max_size=6)))
        runs = list(zip(edges[::2], edges[1::2], strict=False))
        valid = draw(st.sampled_from([None, runs]))
        groups = draw(st.integers(1, 256))
        value = draw(ids).sibling(0)
        chunks.append(
            StoredChunk(id=value.hex, start=position, rows=rows, bytes=rows, groups=groups, valid=valid)
        )
        position += rows
    return Receipt(run="r", epoch=0, field="x", start=start, rows=position - start, chunks=chunks)


@settings(deadline=None)
@given(receipts())
def test_receipts(receipt: Receipt) -> None:
    assert Receipt.from_json(receipt.to_json()) == receipt
    covered = [position for span in receipt.spans() for position in range(span.start, span.end)]
    expected = []
    for chunk in receipt.chunks:
        runs = [(0, chunk.rows)] if chunk.valid is None else chunk.valid
        expected += [chunk.start + row for first, end in runs for row in range(first, end)]
    assert covered == expected
