"""From a caller's array to chunks: each rule, and each refusal with its words."""

from __future__ import annotations

import importlib

import numpy as np
import pyarrow as pa
import pytest

from arrow_tq.producer.encode import Encoded, encode
from arrow_tq_schemas import Field, IdFactory
from arrow_tq_schemas.chunks import verify
from arrow_tq_schemas.errors import InvalidField, InvalidInput, ValueOutOfRange
from arrow_tq_schemas.presets import indexer_topk, routed_experts

IDS = IdFactory()
SCALAR = Field("token_ids", "int32")
EXPERTS = routed_experts(layers=3, topk=2, num_experts=8)
BFLOAT = Field("x", "bfloat16")


def put(field: Field, array: object, start: int = 10, chunk_bytes: int = 1 << 20) -> Encoded:
    encoded = encode(field, array, start, run="r", epoch=3, shard=5, ids=IDS, chunk_bytes=chunk_bytes)
    for group, chunks in enumerate(encoded.chunks_by_group):
        position = start
        for chunk, stored in zip(chunks, encoded.receipt.chunks, strict=True):
            header = chunk.header
            assert verify(chunk), "the checksum is that of the values"
            assert (header.run, header.epoch, header.field, header.start) == ("r", 3, field.name, position)
            assert chunk.values.shape == (header.rows, *field.group_shape(group))
            assert chunk.values.dtype == field.type.numpy
            assert chunk.values.flags.c_contiguous
            assert header.chunk_id.group == group
            assert header.chunk_id.shard == 5
            assert header.chunk_id.sibling(0).hex == stored.id
            assert (stored.start, stored.rows) == (header.start, header.rows)
            position += header.rows
        assert position == encoded.receipt.end
    for index, stored in enumerate(encoded.receipt.chunks):
        siblings = [chunks[index] for chunks in encoded.chunks_by_group]
        assert stored.groups == len(siblings)
        assert stored.bytes == sum(chunk.nbytes for chunk in siblings)
    return encoded


def values(encoded: Encoded) -> np.ndarray:
    """Everything that was stored in layer group 0."""
    return np.concatenate([chunk.values for chunk in encoded.chunks_by_group[0]])


def valid_runs(encoded: Encoded) -> list[list[tuple[int, int]] | None]:
    return [chunk.valid for chunk in encoded.receipt.chunks]


# -- layout ----------------------------------------------------------------------------------------


def test_the_storage_dtype_is_referenced_and_not_copied() -> None:
    array = np.arange(100, dtype=np.int32)
    encoded = put(SCALAR, array)
    assert not encoded.copied
    assert np.shares_memory(values(encoded), array) or np.shares_memory(
        encoded.chunks_by_group[0][0].values, array
    )


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100, dtype=np.int32)[::2],
        np.arange(50, dtype=np.int32)[::-1],
        np.arange(50, dtype=">i4"),
        np.arange(50, dtype=np.int64),
        np.frombuffer(b"\0" + np.arange(50, dtype=np.int32).tobytes(), np.int32, offset=1),
        np.arange(50, dtype=np.int32).tolist(),
    ],
    ids=["strided", "reversed", "big-endian", "wider", "unaligned", "list"],
)
def test_everything_else_is_copied(array: object) -> None:
    encoded = put(SCALAR, array)
    assert encoded.copied
    assert values(encoded).tolist() == np.asarray(array).tolist()


def test_a_read_only_array_is_taken() -> None:
    array = np.arange(4, dtype=np.int32)
    array.flags.writeable = False
    assert values(put(SCALAR, array)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("array", [7, np.int64(7), np.array(7, dtype=np.uint8)])
def test_a_single_number_is_one_row(array: object) -> None:
    assert values(put(SCALAR, array)).tolist() == [7]


@pytest.mark.parametrize("field", [SCALAR, EXPERTS])
def test_no_rows_give_a_receipt_without_chunks(field: Field) -> None:
    for array in ([], np.empty((0, *field.shape), np.uint8), pa.chunked_array([], pa.int32())):
        encoded = put(field, array)
        assert encoded.chunks_by_group == [[]]
        assert (encoded.receipt.rows, encoded.receipt.chunks) == (0, [])


def test_chunks_are_equal_pieces_no_larger_than_asked() -> None:
    encoded = put(SCALAR, np.arange(1001, dtype=np.int32), chunk_bytes=4 * 500)
    assert [chunk.header.rows for chunk in encoded.chunks_by_group[0]] == [333, 334, 334]


def test_a_row_larger_than_a_chunk_is_a_chunk() -> None:
    encoded = put(EXPERTS, np.zeros((3, 3, 2), np.uint8), chunk_bytes=1)
    assert [chunk.header.rows for chunk in encoded.chunks_by_group[0]] == [1, 1, 1]


def test_layer_groups_share_rows_and_ids() -> None:
    field = routed_experts(layer_ids=[3, 5, 9], topk=2, num_experts=8, layer_groups=[[3], [5, 9]])
    array = np.arange(7 * 6).reshape(7, 3, 2) % 8
    encoded = put(field, array, chunk_bytes=8)
    rows = [[chunk.header.rows for chunk in chunks] for chunks in encoded.chunks_by_group]
    assert rows == [[1, 2, 2, 2], [1, 2, 2, 2]]
    assert encoded.copied
    for group, layers in enumerate([slice(0, 1), slice(1, 3)]):
        stored = np.concatenate([chunk.values for chunk in encoded.chunks_by_group[group]])
        assert stored.tolist() == array[:, layers].tolist()


@pytest.mark.parametrize("start", [-1, 1.5, "3", None, 1 << 48])
def test_a_start_that_is_no_position_is_refused(start: object) -> None:
    with pytest.raises(InvalidInput, match=r"field 'token_ids': start .*: expected a position from 0 up"):
        encode(SCALAR, [1], start, run="r", epoch=0, shard=0, ids=IDS)  # type: ignore[arg-type]


# -- shapes and dtypes that do not fit -------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (4,), (4, 3), (4, 2, 3), (4, 3, 2, 1), (3, 2)])
def test_a_wrong_shape_names_both(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidField) as caught:
        put(EXPERTS, np.zeros(shape, np.uint8))
    assert str(caught.value) == (
        f"field 'routed_experts': expected an array of shape [rows, 3, 2], got {list(shape)}"
    )


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([1, 2.5], r"field 'token_ids': expected int32, got float64 \(floats are not rounded\)"),
        (np.array([1.0]), r"expected int32, got float64"),
        (np.array([1j]), r"expected int32, got complex128"),
        (["a"], r"expected int32, got <U1"),
        (np.array(["2020-01-01"], "M8[D]"), r"expected int32, got datetime64"),
        ([1, None, 3], r"position 11, index \[\]: expected int32, got None"),
        ([1, [2]], r"position 11: expected an item of shape \[\], got \[1\]"),
        (np.ma.masked_array([1, 2], [False, True]), r"a masked array"),
        (pa.array(["a"]), r"expected int32, got string"),
        (pa.array([1.5]), r"expected int32, got float64"),
        (object(), r"expected int32, got <object"),
        ({1, 2}, r"expected int32, got \{1, 2\}"),
    ],
)
def test_what_is_no_integer_is_refused(array: object, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        put(SCALAR, array)


def test_none_inside_an_item_names_its_index() -> None:
    with pytest.raises(InvalidField, match=r"position 11, index \[2, 0\]: expected uint8, got None"):
        put(EXPERTS, [[[0, 1]] * 3, [[0, 1], [0, 1], [None, 1]]])


# -- number rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32", ">i8", ">u2"])
@pytest.mark.parametrize("value", [8, 200])
def test_an_expert_out_of_range_names_its_place(dtype: str, value: int) -> None:
    array = np.zeros((70_000, 3, 2), dtype)
    array[69_997, 2, 1] = value
    with pytest.raises(ValueOutOfRange) as caught:
        put(EXPERTS, array)
    assert str(caught.value) == (
        f"field 'routed_experts': value {value} at position 70007, index [2, 1]: expected 0 to 7"
    )
    assert caught.value.details["position"] == 70_007
    assert caught.value.details["index"] == [2, 1]


def test_the_storage_dtype_is_checked_too() -> None:
    with pytest.raises(ValueOutOfRange, match=r"value 8 at position 10, index \[0, 1\]: expected 0 to 7"):
        put(EXPERTS, np.array([[[0, 8], [0, 0], [0, 0]]], np.uint8))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int8", 128), ("int8", -129), ("uint8", -1), ("uint64", -1), ("int64", 1 << 63), ("bool", 2)],
)
def test_an_integer_that_does_not_fit_is_refused(dtype: str, value: int) -> None:
    with pytest.raises(ValueOutOfRange, match=rf"field 'x': value {value} at position 11: expected"):
        put(Field("x", dtype), [0, value])


def test_integers_past_int64_stay_exact() -> None:
    assert values(put(Field("x", "uint64"), [0, (1 << 64) - 1])).tolist() == [0, (1 << 64) - 1]
    with pytest.raises(ValueOutOfRange, match=rf"value {1 << 70} at position 11, index \[1\]: expected 0 to"):
        put(Field("x", "uint64", shape=(2,)), [[0, 1], [2, 1 << 70]])


def test_bools_are_integers() -> None:
    assert values(put(SCALAR, np.array([True, False]))).tolist() == [1, 0]
    assert values(put(Field("x", "bool"), [True, False])).tolist() == [1, 0]
    assert values(put(Field("x", "bool"), np.array([1, 0], np.int64))).tolist() == [1, 0]


def test_whole_rows_of_minus_one_are_null() -> None:
    array = np.ones((6, 3, 2), np.int16)
    array[[0, 3, 4]] = -1
    encoded = put(EXPERTS, array)
    (chunk,) = encoded.chunks_by_group[0]
    assert chunk.valid is not None
    assert chunk.valid.tolist() == [False, True, True, False, False, True]
    assert not chunk.values[[0, 3, 4]].any()
    assert valid_runs(encoded) == [[(1, 3), (5, 6)]]
    assert encoded.receipt.rows == 6


def test_a_row_that_is_partly_minus_one_is_out_of_range() -> None:
    array = np.ones((4, 3, 2), np.int32)
    array[1] = -1
    array[2, 1:] = -1
    with pytest.raises(ValueOutOfRange, match=r"value -1 at position 12, index \[1, 0\]: expected 0 to 7"):
        put(EXPERTS, array)


def test_a_row_of_minus_one_counts_over_all_layer_groups() -> None:
    field = routed_experts(layers=2, topk=1, num_experts=8, layer_groups=[[0], [1]])
    with pytest.raises(ValueOutOfRange, match=r"value -1 at position 10, index \[0, 0\]"):
        put(field, np.array([[[-1], [3]]]))
    encoded = put(field, np.array([[[-1], [-1]], [[1], [2]]]))
    assert [
        chunks[0].valid.tolist() for chunks in encoded.chunks_by_group if chunks[0].valid is not None
    ] == [
        [False, True],
        [False, True],
    ]


def test_the_caller_s_rows_of_minus_one_stay_as_they_are() -> None:
    field = Field("e", "int32", shape=(2,), num_experts=8)
    array = np.array([[1, 2], [-1, -1]], np.int32)
    encoded = put(field, array)
    assert encoded.copied
    assert array.tolist() == [[1, 2], [-1, -1]]
    assert values(encoded).tolist() == [[1, 2], [0, 0]]


def test_declared_padding_is_a_value_and_its_nulls_are_no_holes() -> None:
    field = indexer_topk(layers=1, topk=2)
    encoded = put(field, np.array([[[-1, -1]], [[5, -1]]]))
    assert (encoded.chunks_by_group[0][0].valid, valid_runs(encoded)) == (None, [None])
    nulls = pa.array([None, [7, 8]], pa.list_(pa.int32(), 2))
    encoded = put(Field("p", "int32", shape=(2,), pad=-1), nulls)
    (chunk,) = encoded.chunks_by_group[0]
    assert chunk.valid is not None
    assert (chunk.valid.tolist(), chunk.values.tolist()) == ([False, True], [[0, 0], [7, 8]])
    assert valid_runs(encoded) == [None]


def test_padding_of_expert_ids_is_in_range() -> None:
    field = Field("e", "uint8", shape=(2,), num_experts=8, pad=255)
    assert values(put(field, np.array([[7, 255]]))).tolist() == [[7, 255]]
    signed = Field("e", "int16", shape=(2,), num_experts=8, pad=-1)
    encoded = put(signed, np.array([[-1, -1], [7, -1]]))
    assert (values(encoded).tolist(), valid_runs(encoded)) == ([[-1, -1], [7, -1]], [None])
    with pytest.raises(ValueOutOfRange, match=r"value 9 at position 10, index \[0\]"):
        put(field, np.array([[9, 255]]))


def test_floats_change_width_and_never_overflow() -> None:
    narrow = Field("x", "float16")
    special = np.array([0.1, np.inf, -np.inf, np.nan, -0.0, 65504.0])
    assert np.array_equal(values(put(narrow, special)), special.astype(np.float16), equal_nan=True)
    with pytest.raises(ValueOutOfRange, match=r"field 'x': value 65520.0 at position 11: expected a finite"):
        put(narrow, np.array([np.inf, 65520.0]))
    assert values(put(Field("x", "float64"), np.array([0.1], np.float32))).tolist() == [
        float(np.float32(0.1))
    ]


def test_integers_into_floats_must_be_exact() -> None:
    assert values(put(Field("x", "float32"), [0, -3, 1 << 24])).tolist() == [0.0, -3.0, float(1 << 24)]
    assert values(put(BFLOAT, [0, 1, -2])).tolist() == [0, 0x3F80, 0xC000]
    with pytest.raises(ValueOutOfRange, match=r"value 16777217 at position 10: expected -16777216 to"):
        put(Field("x", "float32"), [(1 << 24) + 1])


# -- bfloat16 --------------------------------------------------------------------------------------


def test_every_bfloat16_comes_back_bit_by_bit() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    encoded = put(BFLOAT, bits)
    assert not encoded.copied
    assert np.array_equal(values(encoded), bits)


def test_rounding_is_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F800000, 0x7FC00001], np.uint32)
    stored = values(put(BFLOAT, bits.view(np.float32)))
    assert [hex(value) for value in stored] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80", "0x7f80", "0x7fc0"]


def test_a_double_is_rounded_once() -> None:
    # Just above and below a tie: the nearest float32 is the tie itself, whose second rounding would err.
    above, below = 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40
    assert values(put(BFLOAT, np.array([above, -above, below]))).tolist() == [0x3F81, 0xBF81, 0x3F81]


def test_bfloat16_does_not_overflow() -> None:
    largest = np.array([0x7F7F7FFF], np.uint32).view(np.float32)
    assert values(put(BFLOAT, largest)).tolist() == [0x7F7F]
    for value in (np.float32(3.4e38), np.float64(1e300)):
        with pytest.raises(ValueOutOfRange, match=r"position 10: expected a finite bfloat16"):
            put(BFLOAT, np.array([value]))


def test_int16_is_not_taken_for_bfloat16() -> None:
    with pytest.raises(InvalidField, match=r"int16 for bfloat16 could be numbers or bits"):
        put(BFLOAT, np.zeros(3, np.int16))


def test_torch_tensors_of_bfloat16_keep_their_bits() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    tensor = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    assert np.array_equal(values(put(BFLOAT, tensor)), bits)
    assert np.array_equal(
        values(put(BFLOAT, tensor.reshape(2, -1)[:, ::3].reshape(-1))),
        values(put(BFLOAT, np.ascontiguousarray(bits.reshape(2, -1)[:, ::3]).reshape(-1))),
    )
    widened = values(put(Field("x", "float32"), torch.tensor([1.5, -2.0], dtype=torch.bfloat16)))
    assert widened.tolist() == [1.5, -2.0]


def test_torch_tensors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, requires_grad=False).reshape(2, 3, 2) % 8
    assert values(put(EXPERTS, tensor)).tolist() == tensor.tolist()
    grown = torch.ones(3, requires_grad=True)
    assert values(put(Field("x", "float32"), grown)).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(InvalidField, match=r"field 'token_ids': a tensor that numpy cannot show"):
        put(SCALAR, torch.zeros(2, dtype=torch.float8_e5m2))


def test_ml_dtypes_bfloat16_keeps_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    assert np.array_equal(values(put(BFLOAT, bits.view(ml_dtypes.bfloat16))), bits)


def test_encoding_imports_no_torch() -> None:
    for name in ("arrays", "convert", "encode"):
        module = importlib.import_module(f"arrow_tq.producer.{name}")
        assert not hasattr(module, "torch")


# -- pyarrow ---------------------------------------------------------------------------------------


def test_arrow_nulls_are_null_rows() -> None:
    for array in (pa.array([1, None, 3], pa.int64()), pa.array([0, 1, None, 3], pa.int32())[1:]):
        encoded = put(SCALAR, array)
        assert values(encoded).tolist() == [1, 0, 3]
        assert valid_runs(encoded) == [[(0, 1), (2, 3)]]


def test_what_lies_under_a_null_is_neither_checked_nor_stored() -> None:
    # The slots of null rows hold what no expert id may be.
    flat = pa.array([1, 2, 99, 99, 3, 4], pa.int32())
    array = pa.FixedSizeListArray.from_arrays(flat, 2, mask=pa.array([False, True, False]))
    encoded = put(Field("e", "uint8", shape=(2,), num_experts=8), array)
    assert values(encoded).tolist() == [[1, 2], [0, 0], [3, 4]]
    encoded = put(Field("e", "int32", shape=(2,)), array)
    assert values(encoded).tolist() == [[1, 2], [0, 0], [3, 4]]


def test_nested_and_sliced_fixed_size_lists() -> None:
    rows = [[[index, index + 1]] * 3 for index in range(6)]
    nested = pa.array(rows, pa.list_(pa.list_(pa.int32(), 2), 3))
    assert values(put(EXPERTS, nested[2:5])).tolist() == rows[2:5]
    tensor = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [3, 2]),
        pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(rows).astype(np.int32)), 6),
    )
    assert values(put(EXPERTS, tensor[2:5])).tolist() == rows[2:5]
    chunked = pa.chunked_array([nested[:2], nested[2:2], nested[2:]])
    assert values(put(EXPERTS, chunked)).tolist() == rows


def test_a_null_inside_a_row_is_refused() -> None:
    array = pa.array([[1, 2], [3, None]], pa.list_(pa.int32(), 2))
    with pytest.raises(InvalidField, match=r"field 'e': a null inside the row at position 11"):
        put(Field("e", "int32", shape=(2,)), array)
    nested = pa.array([[[1], [2]], [None, [3]]], pa.list_(pa.list_(pa.int32(), 1), 2))
    with pytest.raises(InvalidField, match=r"field 'e': null lists inside rows"):
        put(Field("e", "int32", shape=(2, 1)), nested)


def test_arrow_bools_and_lists_of_wrong_type() -> None:
    assert values(put(Field("x", "bool"), pa.array([True, None, False])[1:])).tolist() == [0, 0]
    with pytest.raises(InvalidField, match=r"expected int32, got list<item: int64>"):
        put(SCALAR, pa.array([[1], [2]]))
    permuted = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [3, 2], permutation=[1, 0]),
        pa.FixedSizeListArray.from_arrays(pa.array(range(6), pa.int32()), 6),
    )
    with pytest.raises(InvalidField, match=r"permutation \[1, 0\]"):
        put(EXPERTS, permuted)
