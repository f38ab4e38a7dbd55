"""Field declarations: what they derive, and what they refuse in which words."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from arrow_tq_schemas import dtypes, presets
from arrow_tq_schemas.errors import InvalidField, InvalidInput
from arrow_tq_schemas.fields import Field, Task

LAYERED = {"name": "e", "dtype": "uint8", "shape": (3, 2), "layer_axis": 0}


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"name": "3x", "dtype": "int32"}, r"field name '3x': expected a letter or _"),
        ({"name": "x" * 65, "dtype": "int32"}, r"64 at most"),
        ({"name": ["x"], "dtype": "int32"}, r"field name \['x'\]"),
        ({"name": "x", "dtype": "int33"}, r"field 'x': unknown dtype 'int33': expected one of int8, "),
        ({"name": "x", "dtype": "int32", "shape": 5}, r"field 'x': shape 5: expected a sequence"),
        (
            {"name": "x", "dtype": "int32", "shape": (2, 0)},
            r"shape \(2, 0\): every extent must be at least 1",
        ),
        ({"name": "x", "dtype": "int32", "shape": (True,)}, r"shape \(True,\): expected integers"),
        ({"name": "x", "dtype": "int32", "shape": (1 << 23,)}, r"a row of 33554432 bytes: at most 16777216"),
        ({"name": "x", "dtype": "int32", "domain": "some"}, r"domain 'some': expected one of all, sampled"),
        ({"name": "x", "dtype": "int32", "overlay": "best"}, r"overlay 'best': expected one of last, first"),
        ({"name": "x", "dtype": "int32", "layer_ids": (0,)}, r"layer_ids and layer_groups need a layer_axis"),
        ({**LAYERED, "layer_axis": 2}, r"layer_axis 2 is no axis of shape \(3, 2\)"),
        ({**LAYERED, "layer_axis": True}, r"layer_axis True is no axis"),
        ({**LAYERED, "layer_ids": (0, 1)}, r"2 layer_ids for 3 layers of shape \(3, 2\)"),
        ({**LAYERED, "layer_ids": (0, 1, 1)}, r"layer_ids \[0, 1, 1\]: expected distinct ids from 0 up"),
        ({**LAYERED, "layer_ids": (0, 1, -1)}, r"layer_ids \[0, 1, -1\]: expected distinct ids from 0 up"),
        ({**LAYERED, "layer_groups": ((0, 2), (1,))}, r"list layer_ids \[0, 1, 2\] once, in order"),
        ({**LAYERED, "layer_groups": ((0, 1, 2), ())}, r"expected non-empty groups"),
        ({**LAYERED, "layer_groups": 5}, r"layer_groups 5: expected lists of layer ids"),
        ({**LAYERED, "layer_groups": (5,)}, r"layer_groups 5: expected a sequence of integers"),
        ({**LAYERED, "num_experts": 0}, r"num_experts 0: expected a positive integer"),
        ({**LAYERED, "num_experts": True}, r"num_experts True: expected a positive integer"),
        ({**LAYERED, "num_experts": 257}, r"dtype uint8 cannot hold ids up to 256"),
        ({"name": "x", "dtype": "float32", "num_experts": 4}, r"dtype float32 cannot hold ids up to 3"),
        ({"name": "x", "dtype": "uint8", "pad": -1}, r"field 'x': pad -1 does not fit uint8"),
        ({"name": "x", "dtype": "int32", "fill": 0.5}, r"fill 0.5 does not fit int32"),
        ({"name": "x", "dtype": "int32", "fill": 10**400}, r"does not fit int32"),
        ({"name": "x", "dtype": "int32", "fill": "0"}, r"fill '0': expected a number"),
        ({"name": "x", "dtype": "bool", "fill": 2}, r"fill 2 is not a bool"),
        ({"name": "x", "dtype": "float32", "fill": float("nan")}, r"fill nan: expected a finite float32"),
        ({"name": "x", "dtype": "float16", "pad": 1e6}, r"pad 1000000.0: expected a finite float16"),
        ({"name": "x", "dtype": "bfloat16", "pad": 3.4e38}, r"pad 3.4e\+38: expected a finite bfloat16"),
        ({"name": "x", "dtype": "float64", "fill": 10**400}, r"expected a finite float64"),
        ({"name": "x"}, r"unknown or missing keys"),
        ({"name": "x", "dtype": "int32", "layers": 3}, r"unknown or missing keys \['layers'\]"),
        ([1], r"field declaration \[1\]: expected an object"),
    ],
)
def test_what_does_not_fit_is_named(declaration: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Field.from_json(declaration)


def test_more_groups_than_an_id_counts_are_refused() -> None:
    ids = tuple(range(257))
    with pytest.raises(InvalidField, match=r"257 layer_groups: at most 256"):
        Field("e", "uint8", shape=(257,), layer_axis=0, layer_groups=tuple((layer,) for layer in ids))


def test_layers_are_global_ids() -> None:
    field = presets.routed_experts(layer_ids=[1, 4, 9], topk=2, layer_groups=[[1], [4, 9]])
    assert field.groups == ((1,), (4, 9))
    assert (field.group_shape(0), field.group_shape(1)) == ((1, 2), (2, 2))
    assert field.layer_index([9, 1]) == (2, 0)
    with pytest.raises(InvalidField, match=r"layers \[0\] are not among its layer ids \[1, 4, 9\]"):
        field.layer_index([0, 1])
    with pytest.raises(InvalidField, match=r"field 'token_ids': has no layer axis"):
        presets.token_ids().layer_index([0])


def test_a_layer_axis_need_not_be_the_first() -> None:
    field = Field("e", "int16", shape=(2, 3), layer_axis=1, layer_groups=((0,), (1, 2)))
    assert field.layer_ids == (0, 1, 2)
    assert (field.group_shape(0), field.group_shape(1)) == ((2, 1), (2, 2))
    assert field.row_bytes == 12


def test_a_field_without_layers_has_one_group() -> None:
    assert presets.token_ids().groups == ((),)
    assert presets.token_ids().group_shape(0) == ()


@pytest.mark.parametrize(
    ("dtype", "fill", "stored"),
    [
        ("bfloat16", 0.1, 0x3DCD),
        ("bfloat16", -1, 0xBF80),
        ("bool", True, 1),
        ("float16", 0.1, np.float16(0.1)),
        ("int8", -1.0, -1),
    ],
)
def test_fill_is_in_the_storage_dtype(dtype: str, fill: float, stored: float) -> None:
    field = Field("x", dtype, fill=fill, pad=fill)
    assert field.fill_value == stored
    assert field.pad_value == stored
    assert field.fill_value.dtype == field.type.numpy
    assert Field("x", dtype).fill_value == 0
    assert Field("x", dtype).pad_value is None


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_every_dtype_has_an_arrow_column(dtype: str) -> None:
    field = Field("x", dtype, shape=(2, 3))
    schema = field.arrow_schema()
    assert schema.field(0).metadata == {b"arrow_tq.dtype": dtype.encode()}
    assert schema.field(0).type == pa.fixed_shape_tensor(field.type.arrow, [2, 3])
    assert field.type.numpy.byteorder in "<|="
    assert field.row_bytes == 6 * field.type.numpy.itemsize


@pytest.mark.parametrize(
    ("count", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65537, "int32")]
)
def test_the_narrowest_dtype_for_ids(count: int, dtype: str) -> None:
    assert dtypes.smallest_id_dtype(count) == dtype
    assert presets.routed_experts(layers=1, num_experts=count).dtype == dtype


def test_declarations_equal_themselves_after_a_trip_through_json() -> None:
    for field in (
        presets.routed_experts(layer_ids=[1, 4], layer_groups=[[1], [4]]),
        presets.indexer_topk(layers=2, topk=8),
        presets.logprobs(),
    ):
        declared = field.to_json()
        assert json.loads(json.dumps(declared)) == declared
        assert Field.from_json(declared) == field


def test_a_preset_without_layers_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"shape \(0, 8\): every extent must be at least 1"):
        presets.routed_experts()


def test_tasks() -> None:
    task = Task("critic", ["token_ids"])  # type: ignore[arg-type]
    assert task.fields == ("token_ids",)
    assert (task.reads("token_ids"), task.reads("logprobs")) == (True, False)
    assert Task("actor").reads("anything")
    assert task.to_json() == {"name": "critic", "fields": ["token_ids"]}
    for fields in ("token_ids", 5):
        with pytest.raises(InvalidField, match=r"task 'critic': fields must be a list of names"):
            Task("critic", fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"task 'critic': field 'a b': expected a letter"):
        Task("critic", ("a b",))
