"""Generated dicts come back equal in value and type, whole and in part."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from arrow_tq import errors
from arrow_tq.bundles import Structure, array_rows, plans
from arrow_tq.testing.bundles import same
from tests.bundling import Memory
from tests.drawing import drawn

DTYPES = (
    *("int8", "uint8", "int16", "<i4", ">i4", "int64", "uint64", "float16", "float32", ">f8", "float64"),
    *("bool", "complex64", "M8[us]", "m8[D]", "S3", "<U2"),
)
TORCH = ("bfloat16", "float32", "float16", "int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn")
any_text = st.text(st.characters(), max_size=6) | st.sampled_from(["\ud800", "\ud83d\ude00", "~", "a.b[0]"])
"""Any code point, lone surrogates included."""
any_float = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack("<d", raw)[0]) | st.floats()
"""Any bits: every NaN, both zeros."""
any_int = st.integers() | st.integers(-(2**31), 2**31 - 1) | st.integers(2**62, 2**65)


@st.composite
def arrays(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = np.dtype(dtype)
    raw = draw(st.binary(min_size=1, max_size=16))
    count = int(np.prod(shape)) * kind.itemsize
    if kind.kind == "b":
        raw = bytes(one % 2 for one in raw)
    if kind.kind == "U":
        raw = "xyä".encode("utf-32-le")
    values = np.frombuffer((raw * (count // len(raw) + 1))[:count], kind).reshape(shape)
    order = draw(st.sampled_from("CFS"))
    if order == "F":
        return np.asfortranarray(values)
    return values[..., ::1] if order == "S" and values.ndim else values


def tensors(dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    count = int(np.prod(shape, dtype=np.int64))
    values = torch.arange(count, dtype=torch.float32) - 2
    return values.to(getattr(torch, dtype)).reshape(shape)


@st.composite
def shapes(draw: st.DrawFn, ndim: int) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim)))


@st.composite
def array_column(draw: st.DrawFn, rows: int) -> list[Any]:
    dtype = draw(st.sampled_from(DTYPES))
    ndim = draw(st.integers(0, 3))
    fixed = draw(st.none() | shapes(ndim))
    return [draw(arrays(dtype, fixed if fixed is not None else draw(shapes(ndim)))) for _ in range(rows)]


@st.composite
def tensor_column(draw: st.DrawFn, rows: int) -> list[Any]:
    dtype = draw(st.sampled_from(TORCH))
    ndim = draw(st.integers(0, 2))
    return [tensors(dtype, draw(shapes(ndim))) for _ in range(rows)]


def numbers() -> st.SearchStrategy[st.SearchStrategy[Any]]:
    return st.sampled_from(
        [
            *(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1), any_int, any_float),
            *(st.booleans(), st.integers(0, 3) | st.booleans(), any_float | st.integers(0, 3)),
        ]
    )


@st.composite
def list_column(draw: st.DrawFn, rows: int) -> list[Any]:
    element = draw(numbers())
    return [draw(st.lists(element, max_size=4)) for _ in range(rows)]


@st.composite
def scalar_column(draw: st.DrawFn, rows: int) -> list[Any]:
    scalars = [
        *(any_text, st.binary(max_size=5), any_float.map(np.float64), st.integers(0, 255).map(np.uint8)),
        any_float.map(lambda one: np.frombuffer(struct.pack("<d", one)[:4], "<f4")[0]),
    ]
    element = draw(st.one_of(numbers(), st.sampled_from(scalars)))
    return [draw(element) for _ in range(rows)]


atoms = (
    st.none() | st.booleans() | any_int | any_float | any_text | st.binary(max_size=5)
    | st.builds(complex, any_float, any_float) | st.floats(width=32).map(np.float32)
    | st.binary(max_size=3).map(bytearray)
    | arrays("int32", (2, 2)) | arrays(">f8", (0,)) | st.just("").map(lambda _: tensors("bfloat16", (3,)))
)  # fmt: skip
nested = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(any_text | st.just("~"), inner, max_size=3)
        | st.dictionaries(st.integers() | st.booleans() | st.tuples(any_text), inner, max_size=2)
    ),
    max_leaves=6,
)


@st.composite
def object_column(draw: st.DrawFn, rows: int) -> list[Any]:
    return [draw(nested) for _ in range(rows)]


@st.composite
def column(draw: st.DrawFn, rows: int) -> Any:
    kinds = [
        array_column,
        array_column,
        tensor_column,
        list_column,
        list_column,
        scalar_column,
        object_column,
    ]
    found = draw(draw(st.sampled_from(kinds))(rows))
    if draw(st.booleans()):
        gaps = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        found = [None if gap else one for gap, one in zip(gaps, found, strict=True)]
    return found


@st.composite
def bundles(draw: st.DrawFn) -> dict[Any, Any]:
    rows = draw(st.integers(0, 6))
    shape = draw(shapes(draw(st.integers(0, 3))))
    whole = (
        nested
        | arrays("float32", (2, 3))
        | st.sampled_from(TORCH).map(lambda one: tensors(one, shape))
        | st.sampled_from(DTYPES).flatmap(lambda one: arrays(one, (rows, 2)))
    )
    value = column(rows) | column(rows) | whole
    return draw(st.dictionaries(any_text | st.sampled_from(["tokens", "rewards"]), value, max_size=5))


def check(
    value: dict[Any, Any], chunk_bytes: int, span_bytes: int | None, rows: list[int], late: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if late:
            # Rows are looked at one after the other, when they are gathered.
            patch.setattr(array_rows, "AHEAD_ROWS", 1)
            patch.setattr(plans, "BLOCK_BYTES", 16)
        memory = Memory(value, chunk_bytes=chunk_bytes)
    same(value, memory.get(span_bytes=span_bytes))
    count = memory.structure.rows
    chosen = [row % count for row in rows] if count else []
    got = memory.get(rows=chosen, span_bytes=span_bytes)
    for (key, one), part in zip(value.items(), got.values(), strict=True):
        if isinstance(one, list) and len(one) == count:
            same([one[row] for row in chosen], part, str(key))
        elif type(one) is np.ndarray and one.ndim and len(one) == count:
            same(one[chosen], part, str(key))
        elif not (hasattr(one, "shape") and one.shape and one.shape[0] == count):
            same(one, part, str(key))


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the numbers of a JSON value are."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return [one for key, part in parts for one in numbers_in(part, (*path, key))]
    return [path] if isinstance(value, int) and not isinstance(value, bool) else []


CASES = (
    bundles(),
    st.sampled_from([1, 64, 200, 1 << 20]),
    st.none() | st.integers(1, 100),
    st.lists(st.integers(0, 50), max_size=4),
    st.booleans(),
)
SLACK = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, deadline=None, suppress_health_check=SLACK)
@given(*CASES)
def test_generated_dicts(
    value: Any, chunk_bytes: int, span_bytes: int | None, rows: list[int], late: bool
) -> None:
    check(value, chunk_bytes, span_bytes, rows, late)


@pytest.mark.slow
@settings(max_examples=drawn(2000), deadline=None, suppress_health_check=SLACK)
@given(*CASES)
def test_two_thousand_generated_dicts(
    value: Any, chunk_bytes: int, span_bytes: int | None, rows: list[int], late: bool
) -> None:
    check(value, chunk_bytes, span_bytes, rows, late)


@settings(max_examples=100, deadline=None, suppress_health_check=SLACK)
@given(bundles(), st.data())
def test_a_structure_with_other_numbers_is_read_or_refused(value: Any, data: st.DataObject) -> None:
    """Whatever a producer claims, a consumer gets values or an error of ours."""
    memory = Memory(value)
    whole = json.loads(memory.structure.to_bytes())
    *path, last = data.draw(st.sampled_from(numbers_in(whole)))
    target = whole
    for step in path:
        target = target[step]
    target[last] = data.draw(st.integers(-2, 70) | st.sampled_from([1 << 20, 1 << 40, 1 << 70]))
    try:
        memory.structure = Structure.from_bytes(json.dumps(whole).encode())
        memory.get()
        memory.get(rows=[0] if memory.structure.rows else [])
    except errors.ArrowTQError:
        pass
