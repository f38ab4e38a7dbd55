"""What is handed over: deterministic, so that both ends can build it and compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Fields = dict[str, list[Array] | list[list[int]] | list[list[float]] | list[int] | list[float]]


@dataclass(frozen=True, slots=True)
class Payload:
    """A dict of per-sample values, and how many bytes its numbers take.

    Attributes:
        fields: one list a field, one element a sample.
        nbytes: of all numbers, in the dtype that a store would keep them in.
        layers: how many layers a row of the heavy field has; 0 where it has none.
    """

    name: str
    fields: Fields
    nbytes: int
    layers: int = 0

    @property
    def samples(self) -> int:
        return len(next(iter(self.fields.values())))


def _lengths(random: np.random.Generator, samples: int, mean: int) -> list[int]:
    """Ragged lengths around ``mean``, an eighth to either side."""
    return [int(n) for n in random.integers(mean - mean // 8, mean + mean // 8 + 1, samples)]


def miles(samples: int, rows: str) -> Payload:
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
    return Payload(f"miles-{samples}-{rows}", {**heavy, **small}, nbytes)


def routing(name: str, samples: int, tokens: int, layers: int, dtype: str, ragged: bool) -> Payload:
    """Trajectories with the router's choices: ``[T, layers, 8]`` of 256 experts, and the token ids."""
    random = np.random.default_rng(samples)
    lengths = _lengths(random, samples, tokens) if ragged else [tokens] * samples
    ids = [random.integers(0, 150_000, n, dtype=np.int32) for n in lengths]
    experts = [random.integers(0, 256, (n, layers, 8), dtype=np.uint8).astype(dtype) for n in lengths]
    nbytes = sum(one.nbytes for one in (*ids, *experts))
    return Payload(name, {"token_ids": ids, "routed_experts": experts}, nbytes, layers)


def indexer(samples: int, tokens: int) -> Payload:
    """Sparse-attention positions: ``[T, 12, 2048]`` int32."""
    random = np.random.default_rng(3)
    ids = [random.integers(0, 150_000, tokens, dtype=np.int32) for _ in range(samples)]
    choices = [random.integers(0, tokens, (tokens, 12, 2048), dtype=np.int32) for _ in range(samples)]
    nbytes = sum(one.nbytes for one in (*ids, *choices))
    return Payload("indexer-topk", {"token_ids": ids, "indexer_topk": choices}, nbytes, 12)


_FIXED: dict[str, Callable[[], Payload]] = {
    "r3-512-ragged": lambda: routing("r3-512-ragged", 512, 2100, 40, "uint8", True),
    "r3-64x16k-uint8": lambda: routing("r3-64x16k-uint8", 64, 16_384, 40, "uint8", False),
    "r3-64x16k-int32-48": lambda: routing("r3-64x16k-int32-48", 64, 16_384, 48, "int32", False),
    "indexer-topk": lambda: indexer(8, 4096),
    "chunks-40000x64": lambda: routing("chunks-40000x64", 40_000, 64, 40, "uint8", False),
    "r3-smoke": lambda: routing("r3-smoke", 4, 64, 4, "uint8", True),
}
_MILES = re.compile(r"miles-(\d+)-(ndarray|list)")
NAMES = (
    *(f"miles-{samples}-{rows}" for samples in (512, 4096, 16_384) for rows in ("ndarray", "list")),
    *(name for name in _FIXED if not name.endswith("smoke")),
)


def build(name: str) -> Payload:
    """The payload of that name; raises ``ValueError`` naming those that there are."""
    matched = _MILES.fullmatch(name)
    if matched:
        return miles(int(matched[1]), matched[2])
    if name not in _FIXED:
        raise ValueError(f"no payload {name!r}: expected one of {', '.join(NAMES)}")
    return _FIXED[name]()


def difference(expected: Payload, fields: Mapping[str, object], layers: range | None = None) -> str | None:
    """Where what came back differs from what went in; None: nowhere.

    Numbers are compared; whether a row is an ndarray or a torch tensor is the system's own affair.
    """
    for name, values in expected.fields.items():
        got = fields.get(name)
        if not isinstance(got, list) or len(got) != len(values):
            return f"{name}: expected {len(values)} rows, got {type(got).__name__}"
        for index, (one, other) in enumerate(zip(values, got, strict=True)):
            want = np.asarray(one)
            if layers is not None and want.ndim == 3:
                want = want[:, layers.start : layers.stop]
            if not np.array_equal(want, np.asarray(other)):
                return f"{name}[{index}] differs"
    return None
