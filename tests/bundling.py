"""Bundles through memory alone: the codec without a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from arrow_tq.backend import Fill
from arrow_tq.bundles import LayoutMiss, Structure, pack, plan_fields
from arrow_tq.bundles.pieces import Span
from arrow_tq.bundles.rebuild import keys_of, read_fields, rebuild
from arrow_tq.bundles.selection import Rows, chosen_fields, select


class Memory:
    """A bundle as chunks of bytes, written and read as a store does it.

    Attributes:
        layouts: by field name.
        spans: what the last ``get`` read.
    """

    def __init__(
        self, value: dict[Any, Any], schema: Mapping[str, str] | None = None, chunk_bytes: int = 1 << 20
    ) -> None:
        hints: dict[str, str] = {}
        while True:
            try:
                self._write(value, schema or {}, hints, chunk_bytes)
                return
            except LayoutMiss as miss:
                assert hints.get(miss.name) != miss.instead
                hints[miss.name] = miss.instead

    def _write(
        self, value: dict[Any, Any], schema: Mapping[str, str], hints: Mapping[str, str], chunk_bytes: int
    ) -> None:
        plans = plan_fields(value, schema, hints)
        self.chunks: list[npt.NDArray[np.uint8]] = []

        def write(nbytes: int, fill: Fill) -> None:
            out = np.full(nbytes, 0xAA, np.uint8)
            ends = list(fill(out))
            assert ends == sorted(ends) and all(0 < end <= nbytes for end in ends)
            out.flags.writeable = False
            self.chunks.append(out)

        structure = pack(plans, None, chunk_bytes, write)
        self.layouts = {plan.name: plan.layout for plan in plans}
        self.structure = Structure.from_bytes(structure.to_bytes())

    def fetch(self, spans: Sequence[Span]) -> list[npt.NDArray[np.uint8]]:
        self.spans = list(spans)
        return [self.chunks[span.chunk - 1][span.offset : span.offset + span.nbytes] for span in spans]

    def get(
        self,
        fields: Sequence[Any] | None = None,
        rows: Rows = None,
        row_type: str | None = None,
        span_bytes: int | None = None,
    ) -> dict[Any, Any]:
        positions = chosen_fields(self.structure, fields, keys_of(self.structure))
        selection = select(self.structure, rows, row_type)
        pieces = read_fields(self.structure, positions, selection, self.fetch, span_bytes)
        return rebuild(self.structure, positions, selection, pieces)


def everything(rows: int = 5) -> dict[Any, Any]:
    """A dict with every kind of value, ``rows`` (5 at least) samples."""
    import PIL.Image
    import torch

    nan = np.frombuffer(bytes.fromhex("010000000000f8ff"), "<f8")[0].item()
    image = PIL.Image.new("RGB", (5, 3), (1, 2, 3))
    palette = image.convert("P", palette=PIL.Image.Palette.ADAPTIVE, colors=4)
    palette.info["dpi"] = (72, 72)
    more = rows - 5
    return {
        "ragged": [np.arange(i, dtype=np.int32) for i in range(rows)],
        "equal": [np.full(3, i, np.float32) for i in range(rows)],
        "one_each": [np.array([i], np.int16) for i in range(rows)],
        "all_empty": [np.zeros(0, np.uint8) for _ in range(rows)],
        "none_or_empty_or_zero": [None, np.zeros(0), np.zeros(2), None, np.array([nan]), *[None] * more],
        "cubes": [np.full((i, 2, 3), i, np.uint8) for i in range(rows)],
        "cubes_or_none": [None, *(np.full((i, 2, 3), i, np.uint8) for i in range(rows - 1))],
        "other_shapes": [np.zeros((i, rows - i)) for i in range(rows)],
        "fortran": [np.asfortranarray(np.arange(6).reshape(2, 3)) + i for i in range(rows)],
        "strided": [np.arange(10)[:: i + 1] for i in range(rows)],
        "big_endian": [np.arange(3, dtype=">i4") for _ in range(rows)],
        "zero_d": [np.array(value) for value in (3.5, nan, -0.0, float("inf"), 0.0, *[1.0] * more)],
        "other_dtypes": [np.zeros(2, np.int8), *(np.zeros(2, np.int32) for _ in range(rows - 1))],
        "records": [np.array([(1, 2.5)], [("a", "<i4"), ("b", ">f8", (1,))])] * rows,
        "text_arrays": [np.array(["ab", "c"])] * rows,
        "ints": [[1, 2, 3], [], [4], [2**31 - 1, -(2**31)], [5], *[[0]] * more],
        "wide_ints": [[1, 2**40], [], [4], [-(2**63)], [2**63 - 1], *[[0]] * more],
        "huge_ints": [[1, 2**90], [], [4], [5], [6], *[[0]] * more],
        "mixed": [[1, True], [1.0], [], [None], ["x"], *[[0]] * more],
        "floats": [[1.0, nan, -0.0], [], [4.0], [float("-inf")], [7.0], *[[0.5]] * more],
        "ints_and_floats": [[1.0, 2], [], [3.0], [4.0], [5.0], *[[0.5]] * more],
        "bools": [[True], [False, True], [], [], [True], *[[False]] * more],
        "lists_or_none": [None, [1], [], None, [2], *[None] * more],
        "numpy_in_lists": [[np.int64(1)], [2], [], [], [], *[[0]] * more],
        "scalar": list(range(rows)),
        "scalar_or_none": [1, None, 3, 4, 5, *[0] * more],
        "reals": [1.5, nan, -0.0, 2.0, 3.0, *[0.0] * more],
        "truth": [True, False, None, None, False, *[True] * more],
        "float32s": [np.float32(i) for i in range(rows)],
        "float64s": [np.float64(nan)] * rows,
        "times": [np.datetime64("2020-01-01", "s")] * rows,
        "big_int": [1, 2**80, 3, 4, 5, *[0] * more],
        "text": ["a", "\ud800", "\ud83d\ude00", "", None, *["ä"] * more],
        "media": [b"\x89PNG", b"", None, b"\x00", b"zz", *[b""] * more],
        "table": np.arange(2 * rows).reshape(rows, 2),
        "table_fortran": np.asfortranarray(np.arange(3.0 * rows).reshape(rows, 3)),
        "tensors": [torch.full((i,), i, dtype=torch.bfloat16) for i in range(rows)],
        "tensor_grids": [torch.ones(i, 2) for i in range(rows)],
        "tensor_or_none": [None, *(torch.ones(i, dtype=torch.bool) for i in range(rows - 1))],
        "multimodal": [
            {"pixel_values": torch.ones(2, 3, dtype=torch.float16), "grid": np.arange(3)},
            None,
            {"pixel_values": torch.zeros(0, 3)},
            {},
            {"nested": (1, [2, {"audio": b"q", "image": image}])},
            *[None] * more,
        ],
        "images": [image, palette, image.convert("L"), None, image.convert("1"), *[image] * more],
        "nones": [None] * rows,
        "none": None,
        "nested": {"a": {"b": [1, 2.5, None, {"~": 1}]}, 1: 2, (1, "x"): "t", None: True, 2.5: b""},
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "tensor_zero_d": torch.tensor(1),
        "tensor_empty": torch.zeros(0, 4),
        "array_zero_d": np.array(3),
        "array_empty": np.zeros((0, 4), np.float16),
        "array_times": np.array(["2020-01-01"], "M8[D]"),
        "empty_dict": {},
        "empty_list": [],
        "str": "x",
        "surrogates": "\ud83d\ude00",
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "float": -0.0,
        "nan": nan,
        "bool": True,
        "tuple": (1, (2.0,), []),
        "complex": complex(1, nan),
        "int_of_many_digits": -(10**5000),
        "numpy_scalar": np.uint8(3),
        ("a", 1): "a key that is no text",
        "\ud800": "nor is this one",
    }
