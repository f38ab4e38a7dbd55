"""What is handed over: deterministic, so that both ends can build it and compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Fields = dict[str, list[Array] | list[list[int]] | list[list[float]] | list[int] | list[float]]
Unit = Literal["batch", "segments", "trajectory"]
"""``batch``: a dict handed over whole; ``segments``: what a rollout leaves, read as one; ``trajectory``:
as they finish, each put by itself."""
TOPK, INDEXER_LAYERS, INDEXER_TOPK = 8, 12, 2048
MILES_ROW_BYTES = (334 + 2 * 256) * 4


@dataclass(frozen=True, slots=True)
class Payload:
    """A dict of per-sample values, and how many bytes its numbers take.

    Attributes:
        fields: one list a field, one element a sample.
        nbytes: of all numbers, in the dtype in which they are handed over.
        unit: what is put at a time.
        part: layers that the consumer wants of the field that has layers; None: all.
    """

    name: str
    fields: Fields
    nbytes: int
    unit: Unit
    part: range | None = None

    @property
    def samples(self) -> int:
        return len(next(iter(self.fields.values())))

    def each(self) -> list[dict[str, object]]:
        """The samples, one dict each."""
        return [
            dict(zip(self.fields, values, strict=True)) for values in zip(*self.fields.values(), strict=True)
        ]

    def wanted(self, name: str, index: int) -> Array:
        """What the consumer wants of a sample's value."""
        value = np.asarray(self.fields[name][index])
        return value if self.part is None else cut(value, self.part)


def cut(value: Array, layers: range) -> Array:
    """Those layers of ``[T, layers, k]``; other shapes as they are. A view."""
    return value[:, layers.start : layers.stop] if value.ndim == 3 else value


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a payload is made of so many samples, and what one weighs, about."""

    samples: int
    sample_bytes: int
    make: Callable[[str, int], Payload]

    @property
    def nbytes(self) -> int:
        return self.samples * self.sample_bytes


def _lengths(random: np.random.Generator, samples: int, mean: int) -> list[int]:
    """Ragged lengths around ``mean``, an eighth to either side."""
    return [int(n) for n in random.integers(mean - mean // 8, mean + mean // 8 + 1, samples)]


def _miles(rows: str) -> Callable[[str, int], Payload]:
    def make(name: str, samples: int) -> Payload:
        """The train dict of Miles and slime: tokens of about 334, responses of 256, the small fields."""
        random = np.random.default_rng(samples)
        tokens = [random.integers(0, 150_000, n, dtype=np.int32) for n in _lengths(random, samples, 334)]
        masks = [np.ones(256, np.int32) for _ in range(samples)]
        logprobs = [-random.random(256, np.float32) for _ in range(samples)]
        nbytes = sum(one.nbytes for field in (tokens, masks, logprobs) for one in field)
        heavy: Fields = {"tokens": tokens, "loss_masks": masks, "rollout_log_probs": logprobs}
        if rows == "list":
            heavy = {name: [one.tolist() for one in values] for name, values in heavy.items()}  # type: ignore[union-attr]
        small: Fields = {
            "response_lengths": [256] * samples,
            "total_lengths": [len(one) for one in tokens],
            "rewards": random.random(samples).tolist(),
            "truncated": [0] * samples,
            "sample_indices": list(range(samples)),
            "rollout_ids": [index // 8 for index in range(samples)],
            "rollout_mask_sums": [256] * samples,
        }
        return Payload(name, {**heavy, **small}, nbytes, "batch")

    return make


def _routing(
    samples: int,
    tokens: int,
    layers: int,
    dtype: str = "uint8",
    *,
    unit: Unit = "segments",
    ragged: bool = False,
    part: range | None = None,
) -> Recipe:
    def make(name: str, count: int) -> Payload:
        """Trajectories with the router's choices, ``[T, layers, 8]`` of 256 experts, and the token ids."""
        random = np.random.default_rng(count)
        lengths = _lengths(random, count, tokens) if ragged else [tokens] * count
        ids = [random.integers(0, 150_000, n, dtype=np.int32) for n in lengths]
        experts = [random.integers(0, 256, (n, layers, TOPK), dtype=np.uint8).astype(dtype) for n in lengths]
        nbytes = sum(one.nbytes for one in (*ids, *experts))
        return Payload(name, {"token_ids": ids, "routed_experts": experts}, nbytes, unit, part)

    return Recipe(samples, tokens * (4 + layers * TOPK * np.dtype(dtype).itemsize), make)


def _indexer(samples: int, tokens: int) -> Recipe:
    def make(name: str, count: int) -> Payload:
        """Sparse-attention positions: ``[T, 12, 2048]`` int32."""
        random = np.random.default_rng(3)
        ids = [random.integers(0, 150_000, tokens, dtype=np.int32) for _ in range(count)]
        shape = (tokens, INDEXER_LAYERS, INDEXER_TOPK)
        choices = [random.integers(0, tokens, shape, dtype=np.int32) for _ in range(count)]
        nbytes = sum(one.nbytes for one in (*ids, *choices))
        return Payload(name, {"token_ids": ids, "indexer_topk": choices}, nbytes, "segments")

    return Recipe(samples, tokens * 4 * (1 + INDEXER_LAYERS * INDEXER_TOPK), make)


_FIXED = {
    "r3-512-ragged": _routing(512, 2100, 40, unit="batch", ragged=True),
    "r3-512-trajectories": _routing(512, 2100, 40, unit="trajectory", ragged=True),
    "r3-64x16k-uint8": _routing(64, 16_384, 40),
    "r3-64x16k-uint8-half": _routing(64, 16_384, 40, part=range(20)),
    "r3-64x16k-int32-48": _routing(64, 16_384, 48, "int32"),
    "indexer-topk": _indexer(8, 4096),
    "chunks-40000x64": _routing(40_000, 64, 40),
    "r3-smoke": _routing(4, 64, 4, ragged=True, part=range(2)),
    "r3-trajectories-smoke": _routing(4, 64, 4, ragged=True, unit="trajectory"),
}
_MILES = re.compile(r"miles-(\d+)-(ndarray|list)")
NAMES = (
    *(f"miles-{samples}-{rows}" for samples in (512, 4096, 16_384) for rows in ("ndarray", "list")),
    *(name for name in _FIXED if not name.endswith("smoke")),
)


def recipe(name: str) -> Recipe:
    """How the payload of that name is made; raises ``ValueError`` naming those that there are."""
    matched = _MILES.fullmatch(name)
    if matched:
        return Recipe(int(matched[1]), MILES_ROW_BYTES, _miles(matched[2]))
    if name not in _FIXED:
        raise ValueError(f"no payload {name!r}: expected one of {', '.join(NAMES)}")
    return _FIXED[name]


def difference(expected: Payload, fields: Mapping[str, object]) -> str | None:
    """Where what came back differs from what went in; None: nowhere.

    Numbers are compared; whether a row is an ndarray or a torch tensor is the system's own affair.
    """
    for name, values in expected.fields.items():
        got = fields.get(name)
        if not isinstance(got, list) or len(got) != len(values):
            return f"{name}: expected {len(values)} rows, got {type(got).__name__}"
        for index, other in enumerate(got):
            if not np.array_equal(expected.wanted(name, index), np.asarray(other)):
                return f"{name}[{index}] differs"
    return None
