"""Dicts as rollout frameworks hand them over, and what "exactly equal" means for them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def train_dict(samples: int, *, seed: int = 0, lists: bool = False) -> dict[str, Any]:
    """A train dict with the fields that slime and Miles use, one row a sample, numbers as arrays or lists."""
    chance = np.random.default_rng(seed)
    prompts = chance.integers(50, 110, samples)
    responses = chance.integers(1, 256, samples)
    tokens = [chance.integers(0, 150_000, size).astype(np.int32) for size in prompts + responses]
    masks = [np.ones(size, np.int32) for size in responses]
    logprobs = [-chance.random(size).astype(np.float32) for size in responses]
    ragged = {"tokens": tokens, "loss_masks": masks, "rollout_log_probs": logprobs}
    return {
        **({name: [row.tolist() for row in rows] for name, rows in ragged.items()} if lists else ragged),
        "response_lengths": responses.tolist(),
        "total_lengths": (prompts + responses).tolist(),
        "rewards": [float(value) for value in chance.random(samples)],
        "raw_reward": [{"score": float(value), "format": True} for value in chance.random(samples)],
        "truncated": [int(value) for value in chance.integers(0, 2, samples)],
        "sample_indices": list(range(samples)),
        "rollout_ids": [index // 8 for index in range(samples)],
        "rollout_mask_sums": responses.tolist(),
        "weight_versions": [["12", "13"] for _ in range(samples)],
        "prompt": [f"What is {index} + \ud83d?" for index in range(samples)],
        "teacher_log_probs": [None if index % 3 else row for index, row in enumerate(logprobs)],
        "rollout_routed_experts": None,
        "partition": list(range(0, samples, 2)),
        "num_microbatches": [2, 1],
        "micro_batch_indices": [[[0, 1], [2]], [[3]]],
        "global_batch_sizes": [samples],
        "metadata": {"step": 3, "tool": (1, None, b"\x00"), "nested": {"empty": {}, "list": []}},
    }


def same(left: Any, right: Any, path: str = "bundle") -> None:
    """Equal in value and type, down to the bits of a NaN; raises ``AssertionError`` naming the path."""
    if type(left) is not type(right) or not _alike(left, right):
        raise AssertionError(f"{path}: {_shown(left)} and {_shown(right)}")
    if isinstance(left, dict):
        for (key, one), (other, two) in zip(left.items(), right.items(), strict=True):
            same(key, other, f"{path}: key")
            same(one, two, f"{path}[{_shown(key)}]")
    elif isinstance(left, list | tuple):
        for index, (one, two) in enumerate(zip(left, right, strict=True)):
            same(one, two, f"{path}[{index}]")
    elif isinstance(left, complex):
        same((left.real, left.imag), (right.real, right.imag), path)


def _alike(left: Any, right: Any) -> bool:
    """Whether two values of one type are equal, parts not looked at."""
    if isinstance(left, dict | list | tuple):
        return len(left) == len(right)
    if isinstance(left, np.ndarray | np.generic):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, complex):
        return True
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if type(left).__module__ == "torch":
        return bool(left.dtype == right.dtype and left.shape == right.shape and _bytes(left) == _bytes(right))
    return bool(left == right)


def _shown(value: Any) -> str:
    try:
        return f"{type(value).__name__} {ascii(value)[:80]}"
    except ValueError:
        # Python bounds the digits of an int.
        return f"{type(value).__name__} of many digits"


def _bytes(tensor: Any) -> bytes:
    from arrow_tq.tensors import to_bytes

    return to_bytes(tensor).tobytes()
