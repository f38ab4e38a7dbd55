"""The bundle codec: every kind of value, layouts, cuts, selections, and what it refuses."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from arrow_tq import errors
from arrow_tq.bundles import Structure, array_rows, plan_fields, plans
from arrow_tq.bundles.columns import column_names, positions_of, to_table
from arrow_tq.bundles.rebuild import read_fields
from arrow_tq.bundles.selection import Selection
from arrow_tq.testing.bundles import same, train_dict
from tests.bundling import Memory, everything


@pytest.mark.parametrize(
    ("chunk_bytes", "span_bytes"), [(1 << 20, None), (1 << 20, 256), (512, None), (64, 64)]
)
def test_every_kind_of_value_comes_back(chunk_bytes: int, span_bytes: int | None) -> None:
    value = everything(7)
    same(value, Memory(value, chunk_bytes=chunk_bytes).get(span_bytes=span_bytes))


def test_rows_larger_than_a_block_are_cut_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "BLOCK_BYTES", 64)
    monkeypatch.setattr(plans, "BLOCK_BYTES_MAX", 100)
    value = {
        **everything(6),
        "long": [np.arange(index * 20) for index in range(6)],
        "long_lists": [list(range(index * 50)) for index in range(6)],
        "long_text": ["x" * 500, "", "y" * 90, "z", "", "w" * 101],
        "long_media": [b"x" * 500, None, b"y" * 90, b"z", b"", b"w" * 101],
        "long_objects": [{"a": np.arange(100)}, {"b": "x" * 300}, None, None, 1, {}],
        "wide": np.arange(6 * 200).reshape(6, 200),
    }
    memory = Memory(value, chunk_bytes=128)
    assert max(map(len, memory.chunks)) <= 128
    same(value, memory.get())
    same(value, memory.get(span_bytes=50))
    for rows in ([5, 1], [0], [2, 2, 4]):
        got = memory.get(rows=rows)
        for key in ("long", "long_lists", "long_text", "long_media", "long_objects", "scalar", "text"):
            same(got[key], [value[key][row] for row in rows], key)
        same(got["wide"], value["wide"][rows])


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are looked at when they are gathered, a few at a time, in small dicts too."""
    monkeypatch.setattr(array_rows, "AHEAD_ROWS", 2)
    monkeypatch.setattr(array_rows, "AHEAD_ROW_BYTES", 1 << 20)
    monkeypatch.setattr(plans, "BLOCK_BYTES", 64)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("chunk_bytes", [64, 500, 1 << 20])
def test_every_kind_of_value_is_looked_at_late_too(chunk_bytes: int) -> None:
    value = everything(40)
    memory = Memory(value, chunk_bytes=chunk_bytes)
    same(value, memory.get(span_bytes=100))
    assert memory.layouts["ragged"] == memory.layouts["tensors"] == memory.layouts["cubes"] == "arrays"
    same(value["ragged"][7:9], memory.get(["ragged"], rows=[7, 8])["ragged"])


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("place", [1, 30, 38, 39])
def test_one_row_of_another_kind_is_found_wherever_it_is(place: int) -> None:
    import torch

    plain = [np.full(index % 5, index, np.float32) for index in range(40)]
    others = [
        *(np.ones(3), np.ones(0), np.ones(3, ">f4"), np.ones(3, np.int32), np.zeros(0, ">f4")),
        *(np.ones((3, 1), np.float32), np.ones((0, 2), np.float32), np.array(1, np.float32)),
        *(np.array(["a"]), [1.0], [], 1.0, np.float32(1), "x", torch.ones(3), torch.ones(0)),
        np.array([(1, 2.5)], [("a", "<i4"), ("b", ">f8")]),
    ]
    for other in others:
        for rows in (plain, [row.reshape(-1, 1) for row in plain], list(map(torch.from_numpy, plain))):
            value = {"x": [*rows[:place], other, *rows[place + 1 :]], "y": plain}
            memory = Memory(value)
            same(value, memory.get())
            alike = type(other) is type(rows[0]) and (other.dtype, other.ndim) == (
                rows[0].dtype,
                rows[0].ndim,
            )
            assert memory.layouts == {"x": "arrays" if alike else "objects", "y": "arrays"}


@pytest.mark.usefixtures("late")
def test_rows_without_a_byte_are_of_their_dtype_too() -> None:
    some, empty = [np.ones(4)] * 9, [np.zeros(0)] * 30
    for other in (np.zeros(0, np.float32), np.zeros((0, 1)), np.zeros(0, ">f8"), None):
        value = {"x": [*some, *empty, other, *empty], "y": [*empty, other, *empty], "z": [None, *empty]}
        same(value, Memory(value).get())


def test_many_small_rows_of_which_a_late_one_is_other() -> None:
    """As they are cut and looked at in earnest."""
    rows = [np.full(index % 400, index, np.int32) for index in range(9000)]
    value = {"x": rows, "y": [*rows[:8500], None, *rows[8501:]], "z": [row.reshape(1, -1) for row in rows]}
    memory = Memory(value, chunk_bytes=3 << 20)
    assert len(memory.chunks) < 10
    same(value, memory.get())
    value["x"] = [*rows[:8999], np.ones(1)]
    memory = Memory(value, chunk_bytes=3 << 20)
    assert memory.layouts == {"x": "objects", "y": "arrays", "z": "arrays"}
    same(value, memory.get())


@pytest.mark.parametrize("numbers", [list(range(300)), [1 << 20] * 300, [0.5] * 300])
@pytest.mark.parametrize("place", [1, 7, 298, 299])
def test_one_number_of_another_kind_is_found_wherever_it_is(numbers: list[object], place: int) -> None:
    others: list[object] = [True, 7, 2.5, None, "7", b"1234", [7], (7,), [], 1 << 31, -(1 << 31), 1 << 70, 1j]
    others += [np.int32(7), np.float64(7), np.float32(7), np.array(7, np.int32)]
    for other in others:
        value = {"x": [*numbers[:place], other, *numbers[place + 1 :]], "y": numbers}
        memory = Memory(value)
        same(value, memory.get())
        fits = type(other) is type(numbers[0]) and other != 1 << 70
        # None stands in a column, too.
        assert memory.layouts == {"x": "scalars" if fits or other is None else "objects", "y": "scalars"}


def test_an_empty_tensor_of_numpy_among_other_rows() -> None:
    import torch

    value = {"x": [torch.from_numpy(np.full(0, 0, np.float32)), 1, torch.from_numpy(np.ones((2, 0)))]}
    same(value, Memory(value).get())


def test_a_hint_about_arrays_says_nothing_about_lists() -> None:
    (plan,) = plan_fields({"x": [None, [1], [2, 3]]}, {}, {"x": array_rows.AHEAD})
    assert plan.layout == "lists"


def test_layouts_are_what_the_documentation_says() -> None:
    memory = Memory(everything())
    columns = {
        "arrays": ["ragged", "none_or_empty_or_zero", "cubes_or_none", "big_endian", "tensors", "zero_d"],
        "lists": ["ints", "wide_ints", "floats", "bools", "lists_or_none"],
        "scalars": ["scalar", "scalar_or_none", "reals", "truth", "float32s", "times"],
        "strings": ["text", "media"],
        "array": ["table", "tensor", "array_zero_d", "array_empty"],
        "objects": ["huge_ints", "mixed", "numpy_in_lists", "multimodal", "images", "nested", "none"],
    }
    for layout, names in columns.items():
        assert {name: memory.layouts[name] for name in names} == dict.fromkeys(names, layout)
    assert memory.structure.rows == 5


def test_selected_rows_read_only_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "BLOCK_BYTES", 4096)
    value = {"x": [np.full(1024, index, np.int32) for index in range(64)], "tag": list(range(64))}
    memory = Memory(value, chunk_bytes=1 << 16)
    got = memory.get(["x"], rows=[3, 40])
    assert sum(span.nbytes for span in memory.spans) == 2 * 4096
    same(got["x"], [value["x"][3], value["x"][40]])
    memory.get(["x"], rows=slice(10, 20))
    assert [span.nbytes for span in memory.spans] == [10 * 4096] or sum(
        span.nbytes for span in memory.spans
    ) == 10 * 4096


def test_a_field_that_is_no_row_a_sample_can_be_pinned_whole() -> None:
    value = {"tokens": [np.arange(3)] * 4, "steps": [1, 2, 3, 4]}
    assert Memory(value).get(rows=[1])["steps"] == [2]
    assert Memory(value, {"steps": "whole"}).get(rows=[1])["steps"] == [1, 2, 3, 4]
    pinned = Memory(value, {"tokens": "objects"})
    assert pinned.layouts["tokens"] == "objects"
    same(value, pinned.get())


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"metadata": [None, None, None, {"tool": object()}]}, r"metadata\[3\]\.tool"),
        ({"x": {1, 2}}, "x: a set"),
        ({"x": [np.array([object()])]}, "x: dtype object"),
        ({"x": [[np.ma.array([1])]]}, r"x\[0\]\[0\]: a numpy.ma.MaskedArray"),
        ({"x": {"y": {object(): 1}}}, "x.y: key <object"),
        ({"x": lambda: 1}, "x: a function"),
        ([1], "expected a dict, got list"),
    ],
)
def test_what_cannot_come_back_is_refused_by_path(value: Any, path: str) -> None:
    with pytest.raises(errors.InvalidInput, match=path):
        Memory(value)


def test_tensors_that_are_more_than_their_values_are_refused() -> None:
    import torch

    for tensor, why in (
        (torch.ones(2, requires_grad=True), "requires a gradient"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.empty(2, device="meta"), "meta"),
    ):
        with pytest.raises(errors.InvalidInput, match=why):
            Memory({"x": tensor})
        with pytest.raises(errors.InvalidInput, match=why):
            Memory({"x": [torch.ones(2), tensor]})
    with pytest.raises(errors.InvalidInput, match="Parameter"):
        Memory({"x": torch.nn.Parameter(torch.ones(2), requires_grad=False)})


def test_a_dict_that_holds_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["again"] = [value]
    with pytest.raises(errors.InvalidInput, match="deep, or in itself"):
        Memory({"x": value})


def test_row_types() -> None:
    import torch

    value = everything()
    got = Memory(value).get(rows="numpy")
    same(got["ints"][0], np.array([1, 2, 3], np.int32))
    same(got["scalar"], np.arange(5))
    assert got["tensors"][2].dtype == np.uint16
    got = Memory(value).get(row_type="torch")
    assert torch.equal(got["ragged"][3], torch.arange(3, dtype=torch.int32))
    assert torch.equal(got["floats"][2], torch.tensor([4.0], dtype=torch.float64))
    assert torch.equal(got["scalar"], torch.arange(5))
    same(got["big_endian"], value["big_endian"])
    got["ragged"][3][0] = 7  # memory of its own


def test_arrays_come_back_read_only() -> None:
    got = Memory(everything()).get()
    for key in ("ragged", "equal", "cubes", "none_or_empty_or_zero"):
        assert not any(row.flags.writeable for row in got[key] if row is not None)
    assert not got["table"].flags.writeable
    assert not got["multimodal"][0]["grid"].flags.writeable


def test_columns_for_sql() -> None:
    value = everything()
    memory = Memory(value, chunk_bytes=256)
    names = column_names(memory.structure)
    assert "media" not in names and "nested" not in names and "text_arrays" not in names
    positions = positions_of(memory.structure, names)
    pieces = read_fields(memory.structure, positions, Selection(None, None), memory.fetch, 128)
    table = to_table(memory.structure, positions, pieces)
    table.validate(full=True)
    assert table.num_rows == 5
    rows = table.to_pydict()
    assert rows["ragged"] == [row.tolist() for row in value["ragged"]]
    assert rows["lists_or_none"] == value["lists_or_none"]
    assert rows["truth"] == value["truth"]
    assert rows["tensors"] == [[float(index)] * index for index in range(5)]
    assert rows["big_endian"] == [[0, 1, 2]] * 5
    assert rows["text"][0] == "a" and rows["text"][4] is None and "\ufffd" in rows["text"][1]
    assert json.loads(rows["multimodal"][3]) == {}
    assert to_table(memory.structure, [], {}).num_rows == 5


@pytest.mark.parametrize(
    "break_it",
    [
        lambda whole: whole.update(v=2),
        lambda whole: whole.update(rows=-1),
        lambda whole: whole["fields"][0].update(layout="pickle"),
        lambda whole: whole["fields"][0]["buffers"]["values"][0].__setitem__(2, 1 << 40),
        lambda whole: whole["fields"][0]["buffers"]["values"][0].__setitem__(0, 9),
        lambda whole: whole["fields"][0].pop("meta"),
        lambda whole: whole.pop("chunks"),
    ],
)
def test_a_malformed_structure_is_refused(break_it: Any) -> None:
    memory = Memory({"x": [np.arange(3), np.arange(2)]})
    whole = json.loads(memory.structure.to_bytes())
    break_it(whole)
    with pytest.raises(errors.MalformedMessage, match="structure"):
        Structure.from_bytes(json.dumps(whole).encode())


@pytest.mark.parametrize(
    ("key", "changed"),
    [("dtype", "|O"), ("dtype", "<q9"), ("ndim", 2), ("dtype", "<i8"), ("of", "torch"), ("lengths", 5)],
)
def test_a_structure_that_lies_about_its_bytes_is_told(key: str, changed: object) -> None:
    memory = Memory({"x": [np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)]})
    whole = json.loads(memory.structure.to_bytes())
    whole["fields"][0]["meta"][key] = changed
    memory.structure = Structure.from_bytes(json.dumps(whole).encode())
    with pytest.raises(errors.MalformedMessage):
        memory.get()


def test_msgpack_takes_what_exactness_refuses() -> None:
    class Text(str):
        __slots__ = ()

    value = {"x": [{"a": Text("t"), "b": (1, 2)}, None]}
    with pytest.raises(errors.InvalidInput, match=r"x\[0\]\.a"):
        Memory(value)
    assert Memory(value, {"x": "msgpack"}).get() == {"x": [{"a": "t", "b": [1, 2]}, None]}
    with pytest.raises(errors.InvalidInput, match=r"x\[1\]: msgpack refuses"):
        Memory({"x": [1, object()]}, {"x": "msgpack"})


def test_the_codec_imports_neither_torch_nor_pil() -> None:
    import subprocess

    code = (
        "import sys; from tests.bundling import Memory;"
        "from arrow_tq.testing.bundles import train_dict, same;"
        "value = train_dict(20); same(value, Memory(value).get());"
        "print([name for name in ('torch', 'PIL', 'msgpack', 'pickle') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout and "'PIL'" not in done.stdout and "'msgpack'" not in done.stdout


def test_a_train_dict_in_small_chunks() -> None:
    for lists in (False, True):
        value = train_dict(200, lists=lists)
        memory = Memory(value, chunk_bytes=4096)
        same(value, memory.get())
        part = memory.get(["tokens", "loss_masks", "teacher_log_probs"], rows=[150, 7])
        for key, rows in part.items():
            same(rows, [value[key][150], value[key][7]])
