"""What is written in place is, byte for byte, what pyarrow would have written."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings, strategies as st

from arrow_tq import Field
from arrow_tq.layout.appender import Appender
from arrow_tq.layout.columns import ColumnLayout
from arrow_tq.store import extent_schema
from arrow_tq.store.extent_key import ExtentKey
from arrow_tq_schemas import dtypes
from arrow_tq_schemas.chunks import (
    METADATA_KEY,
    ChunkHeader,
    checksum,
    header_bytes,
    header_json,
    header_parts,
    to_array,
)
from arrow_tq_schemas.ids import IdFactory
from arrow_tq_schemas.receipts import Receipt, StoredChunk, stored_chunk, trusted_receipt

COUNTS = st.integers(0, (1 << 48) - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)


@st.composite
def fields_and_chunks(draw: st.DrawFn) -> tuple[Field, list[tuple[np.ndarray, np.ndarray | None, bytes]]]:
    name = draw(st.sampled_from(dtypes.NAMES))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    layers = draw(st.sampled_from([None, 0])) if shape else None
    field = Field("field", name, shape=shape, layer_axis=layers)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    chunks = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 40))
        raw = random.integers(0, 256, (rows * field.row_bytes), dtype=np.uint8)
        values = raw.view(field.type.numpy).reshape(rows, *shape)
        valid = None
        if draw(st.booleans()):
            valid = random.random(rows) < draw(st.sampled_from([0.0, 0.5, 1.0]))
            values[~valid] = 0
        chunks.append((values, valid, draw(st.binary(min_size=1, max_size=300))))
    return field, chunks


def by_pyarrow(schema: pa.Schema, chunks: list[tuple[np.ndarray, np.ndarray | None, bytes]]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for values, valid, metadata in chunks:
            array = to_array(values, valid, schema.field(0).type)
            batch = pa.RecordBatch.from_arrays([array], schema=schema)
            writer.write_batch(batch, custom_metadata={METADATA_KEY: metadata})
    return sink.getvalue().to_pybytes()


@settings(max_examples=150, deadline=None)
@given(fields_and_chunks(), st.integers(0, 255))
def test_bytes_are_those_of_pyarrow(
    made: tuple[Field, list[tuple[np.ndarray, np.ndarray | None, bytes]]], before: int
) -> None:
    field, chunks = made
    schema = extent_schema.stamp(field.arrow_schema(0), ExtentKey("run", "field", 0, "memory"))
    layout = ColumnLayout(schema)
    # Memory that other chunks lay in before.
    memory = np.full(1 << 19, before, np.uint8)
    appender = Appender(memory, layout)
    appender.begin(schema.serialize().to_pybytes())
    ends = []
    for values, valid, metadata in chunks:
        nulls = None if valid is None or valid.all() else valid
        appender.reserve(len(values) + 1, len(metadata) + 7)  # given up: nothing of it must be left
        reserved = appender.reserve(len(values), len(metadata), nulls is not None)
        reserved.values[...] = values
        appender.complete(reserved, metadata, nulls)
        ends.append(reserved.end)
    end = appender.end()
    expected = by_pyarrow(schema, chunks)
    assert memory[:end].tobytes() == expected
    for (values, valid, _), place in zip(chunks, ends, strict=True):
        nullable = valid is not None and not valid.all()
        got, mask = layout.read(lambda a, n: memory[a : a + n].data, place, len(values), nullable)
        assert got.tobytes() == values.tobytes()
        assert (mask is not None) == nullable
        assert mask is None or valid is None or np.array_equal(mask, valid)


@settings(max_examples=150, deadline=None)
@given(NAMES, NAMES, COUNTS, COUNTS, st.integers(1, (1 << 31) - 1))
def test_headers_are_those_of_pydantic(run: str, field: str, epoch: int, start: int, rows: int) -> None:
    chunk_id = IdFactory().next(3)
    digest = checksum(chunk_id, run, epoch, field, start, np.zeros(3, np.int32), None)
    header = ChunkHeader(
        id=chunk_id.hex, run=run, epoch=epoch, field=field, start=start, rows=rows, checksum=digest
    )
    parts = header_parts(run, epoch, field)
    assert header_json(parts, chunk_id.hex, start, rows, digest) == header.to_bytes()
    assert header_bytes(parts, start, rows) == len(header.to_bytes())
    assert ChunkHeader.from_bytes(header.to_bytes()) == header


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.lists(st.integers(1, 1 << 20), max_size=5), st.integers(1, 256))
def test_receipts_of_trusted_values_are_those_of_checked_ones(
    start: int, rows: list[int], groups: int
) -> None:
    ids, position = IdFactory(), start
    checked, trusted = [], []
    for count in rows:
        name = ids.next(0).hex
        values = {"id": name, "start": position, "rows": count, "bytes": 4 * count, "groups": groups}
        checked.append(StoredChunk.model_construct(**values))
        trusted.append(stored_chunk(name, position, count, 4 * count, groups))
        position += count
    plain = Receipt.model_construct(
        run="r", epoch=1, field="f", start=start, rows=position - start, chunks=checked
    )
    ours = trusted_receipt("r", 1, "f", start, position - start, trusted)
    assert ours == plain
    assert ours.to_json() == plain.to_json()
    if position < 1 << 48:
        assert Receipt.from_json(ours.to_json()) == ours
