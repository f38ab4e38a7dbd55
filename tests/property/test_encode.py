"""Round trips through encode: every dtype, shape and layout, against what the caller's array says."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as npst

from arrow_tq.producer.encode import Encoded, encode
from arrow_tq_schemas import Field, IdFactory, Receipt, dtypes
from arrow_tq_schemas.chunks import Chunk, from_array, verify
from arrow_tq_schemas.errors import ValueOutOfRange
from tests.drawing import drawn

IDS = IdFactory()
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
GROUPED = Field("x", "uint8", shape=(3, 2), layer_axis=0, layer_groups=[[0], [1, 2]], num_experts=10)
items = st.one_of(st.just(()), npst.array_shapes(min_dims=1, max_dims=3, max_side=4))


def put(field: Field, array: object, chunk_bytes: int, start: int = 0) -> Encoded:
    return encode(field, array, start, run="r", epoch=0, shard=0, ids=IDS, chunk_bytes=chunk_bytes)


def gather(field: Field, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
    """All rows again, from the Arrow batches that would be stored: values and validity."""
    by_group, valid = [], np.ones(encoded.receipt.rows, dtype=bool)
    for group, chunks in enumerate(encoded.chunks_by_group):
        parts = [np.empty((0, *field.group_shape(group)), field.type.numpy)]
        for chunk in chunks:
            assert verify(chunk)
            parts.append(through_ipc(field, chunk, group))
            if chunk.valid is not None:
                first = chunk.header.start - encoded.receipt.start
                valid[first : first + chunk.header.rows] &= chunk.valid
        by_group.append(np.concatenate(parts))
    axis = 1 + (field.layer_axis or 0)
    return by_group[0] if len(by_group) == 1 else np.concatenate(by_group, axis=axis), valid


def through_ipc(field: Field, chunk: Chunk, group: int) -> np.ndarray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, field.arrow_schema(group)) as writer:
        writer.write_batch(chunk.to_batch(field))
    (batch,) = pa.ipc.open_stream(sink.getvalue())
    batch.validate(full=True)
    values, valid = from_array(batch.column(0), field.group_shape(group))
    assert (valid is None) == (chunk.valid is None or bool(chunk.valid.all()))
    return values


@st.composite
def laid_out(draw: st.DrawFn, dtype: str, item: tuple[int, ...]) -> np.ndarray:
    """An array ``[rows, *item]`` of any memory layout."""
    rows = draw(st.integers(0, 9))
    array = draw(npst.arrays(dtype, (rows, *item)))
    layout = draw(
        st.sampled_from(["plain", "swapped", "fortran", "strided", "reversed", "read-only", "unaligned"])
    )
    if layout == "swapped":
        return array.astype(array.dtype.newbyteorder())
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided":
        return np.repeat(array, 2, axis=0)[::2]
    if layout == "reversed":
        return array[::-1]
    if layout == "unaligned":
        return np.frombuffer(b"\0" + array.tobytes(), array.dtype, offset=1).reshape(array.shape)
    array.flags.writeable = layout != "read-only"
    return array


def bits(array: np.ndarray) -> list[int]:
    """Bytes of every value in native order, so that NaN payloads count."""
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).view(np.uint8).tolist()


@settings(max_examples=drawn(300), deadline=None)
@given(
    st.data(), st.sampled_from((*INTEGERS, *FLOATS, "bool")), items, st.integers(1, 200), st.integers(0, 99)
)
def test_the_same_dtype_comes_back_bit_by_bit(
    data: st.DataObject, dtype: str, item: tuple[int, ...], chunk_bytes: int, start: int
) -> None:
    field = Field("x", dtype, shape=item)
    array = data.draw(laid_out(dtype, item))
    encoded = put(field, array, chunk_bytes, start)
    values, valid = gather(field, encoded)
    assert bits(values) == bits(array.view(np.uint8) if dtype == "bool" else array)
    assert valid.all()
    assert (encoded.receipt.start, encoded.receipt.rows) == (start, len(array))
    assert Receipt.from_json(encoded.receipt.to_json()) == encoded.receipt
    shared = any(
        np.shares_memory(chunk.values, array) for chunks in encoded.chunks_by_group for chunk in chunks
    )
    assert encoded.copied != shared or not len(array)


@settings(deadline=None)
@given(
    st.sampled_from([Field("x", "int32", shape=(3,)), GROUPED]),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from(["int16", "int32"]),
    st.integers(1, 200),
    st.data(),
)
def test_pieces_are_what_they_are_joined(
    field: Field, lengths: list[int], dtype: str, chunk_bytes: int, data: st.DataObject
) -> None:
    array = data.draw(
        npst.arrays(dtype, (sum(lengths), *field.shape), elements=st.integers(0, 9), fill=st.just(-1))
        if field is GROUPED
        else npst.arrays(dtype, (sum(lengths), *field.shape))
    )
    if field is GROUPED:
        # Rows are null as a whole, or not at all.
        array[(array == -1).any(axis=(1, 2))] = -1
    pieces = np.split(array, np.cumsum(lengths)[:-1])
    joined, one = put(field, pieces, chunk_bytes, 5), put(field, array, chunk_bytes, 5)
    assert [chunk.model_dump(exclude={"id"}) for chunk in joined.receipt.chunks] == [
        chunk.model_dump(exclude={"id"}) for chunk in one.receipt.chunks
    ]
    assert [part.tolist() for part in gather(field, joined)] == [part.tolist() for part in gather(field, one)]
    assert joined.copied or not len(array)


@settings(deadline=None)
@given(npst.arrays(np.uint16, npst.array_shapes(max_dims=1)), st.integers(1, 40))
def test_bfloat16_bits_come_back_with_their_nan_payloads(array: np.ndarray, chunk_bytes: int) -> None:
    field = Field("x", "bfloat16")
    assert gather(field, put(field, array, chunk_bytes))[0].tolist() == array.tolist()


@settings(deadline=None)
@given(npst.arrays(np.float32, npst.array_shapes(max_dims=1)))
def test_rounding_to_bfloat16_is_the_nearest(array: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    field = Field("x", "bfloat16")
    expected = torch.from_numpy(array).to(torch.bfloat16).float().numpy()
    if (np.isinf(expected) & np.isfinite(array)).any():
        with pytest.raises(ValueOutOfRange, match=r"expected a finite bfloat16"):
            put(field, array, 1 << 20)
        return
    stored = gather(field, put(field, array, 1 << 20))[0]
    widened = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert np.array_equal(widened, expected, equal_nan=True)
    assert (np.signbit(widened) == np.signbit(array)).all()


@settings(deadline=None)
@given(npst.arrays(np.float64, 20, elements=st.floats(-3e38, 3e38)))
def test_doubles_round_once_to_bfloat16(array: np.ndarray) -> None:
    field = Field("x", "bfloat16")
    stored = gather(field, put(field, array, 1 << 20))[0].astype(np.uint32)
    for value, got in zip(array.tolist(), stored.tolist(), strict=True):
        near = [candidate for candidate in (got - 1, got, got + 1) if candidate & 0x7FFF <= 0x7F7F]
        errors = {code & 0xFFFF: abs(as_float(code) - value) for code in near if same_sign(code, got)}
        assert errors[got] == min(errors.values())
        # A tie goes to the even one.
        assert sum(error == errors[got] for error in errors.values()) == 1 or got % 2 == 0


def as_float(code: int) -> float:
    return float(np.uint32(code << 16 & 0xFFFFFFFF).view(np.float32))


def same_sign(code: int, other: int) -> bool:
    return 0 <= code <= 0xFFFF and (code ^ other) & 0x8000 == 0


@settings(max_examples=drawn(300), deadline=None)
@given(st.data(), st.sampled_from(INTEGERS), st.sampled_from(INTEGERS), items, st.integers(1, 200))
def test_integers_fit_or_are_named(
    data: st.DataObject, source: str, dtype: str, item: tuple[int, ...], chunk_bytes: int
) -> None:
    field = Field("x", dtype, shape=item)
    array = data.draw(laid_out(source, item))
    low, high = dtypes.dtype(dtype).integer_range or (0, 0)
    wrong = [
        (index, value) for index, value in np.ndenumerate(array.astype(object)) if not low <= value <= high
    ]
    if not wrong:
        assert gather(field, put(field, array, chunk_bytes))[0].tolist() == array.tolist()
        return
    (row, *index), value = wrong[0]
    with pytest.raises(ValueOutOfRange) as caught:
        put(field, array, chunk_bytes, start=100)
    assert caught.value.details == {"field": "x", "value": str(value), "position": 100 + row, "index": index}


@settings(max_examples=drawn(300), deadline=None)
@given(st.data(), st.sampled_from([("int8", 4), ("int16", 300), ("int32", 4), ("int64", 70_000)]))
def test_experts_in_groups_with_whole_and_broken_rows(data: st.DataObject, source: tuple[str, int]) -> None:
    dtype, num_experts = source
    layers, topk, rows = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 8)),
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, layers))) - {layers})
    edges = list(zip([0, *cuts], [*cuts, layers], strict=True))
    field = Field(
        "e",
        dtypes.smallest_id_dtype(num_experts),
        shape=(layers, topk),
        layer_axis=0,
        layer_groups=tuple(tuple(range(*edge)) for edge in edges),
        num_experts=num_experts,
    )
    limit = min(num_experts, np.iinfo(dtype).max + 1)
    elements = st.one_of(st.integers(0, limit - 1), st.integers(0, limit - 1), st.just(-1))
    array = data.draw(npst.arrays(dtype, (rows, layers, topk), elements=elements, fill=st.just(1)))
    array[data.draw(npst.arrays(bool, rows))] = -1
    null = (array == -1).all(axis=(1, 2))
    if ((array == -1).any(axis=(1, 2)) & ~null).any():
        with pytest.raises(ValueOutOfRange, match=r"value -1 at position"):
            put(field, array, 16)
        return
    encoded = put(field, array, data.draw(st.integers(1, 40)), start=7)
    values, valid = gather(field, encoded)
    assert valid.tolist() == (~null).tolist()
    assert values.tolist() == np.where(null[:, None, None], 0, array).tolist()
    covered = np.zeros(rows, dtype=bool)
    for span in encoded.receipt.spans():
        covered[span.start - 7 : span.end - 7] = True
    assert covered.tolist() == (~null).tolist()


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=3, max_size=3)), max_size=9), st.data()
)
def test_arrow_nulls_in_slices(rows: list[list[int] | None], data: st.DataObject) -> None:
    field = Field("x", "int16", shape=(3,))
    first = data.draw(st.integers(0, len(rows)))
    array = pa.array(rows, pa.list_(pa.int64(), 3))[first:]
    values, valid = gather(field, put(field, array, 20))
    assert valid.tolist() == [row is not None for row in rows[first:]]
    assert values.tolist() == [row or [0, 0, 0] for row in rows[first:]]


@settings(deadline=None)
@given(st.data(), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_floats_change_width_or_are_named(data: st.DataObject, source: str, dtype: str) -> None:
    array = data.draw(npst.arrays(source, npst.array_shapes(max_dims=1)))
    field = Field("x", dtype)
    with np.errstate(over="ignore"):
        expected = array.astype(dtype)
    overflow = np.isinf(expected) & np.isfinite(array)
    if overflow.any():
        with pytest.raises(ValueOutOfRange, match=rf"position {int(np.argmax(overflow))}: expected a finite"):
            put(field, array, 1 << 20)
        return
    assert np.array_equal(gather(field, put(field, array, 16))[0], expected, equal_nan=True)
