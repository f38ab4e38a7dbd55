"""Torch tensors as bytes and back, without importing torch before somebody has used it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arrow_tq.bundles.plans import Bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What a tensor is beside its bytes: torch's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def is_tensor(value: object) -> bool:
    """Whether it is a plain ``torch.Tensor``; a subclass (``Parameter``) is not."""
    module = sys.modules.get("torch")
    return module is not None and type(value) is module.Tensor


def described(value: object) -> TensorKind:
    """Raises ``InvalidInput`` for tensors that are more than their values: with grad, sparse, elsewhere."""
    from arrow_tq import tensors

    tensor: torch.Tensor = tensors.check_plain(value)
    return TensorKind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def as_bytes(value: object) -> Bytes:
    """The tensor's values in C order: a view where it is contiguous."""
    from arrow_tq import tensors

    return tensors.to_bytes(tensors.check_plain(value))


def tensor(memory: Bytes, dtype: str, shape: list[int] | tuple[int, ...]) -> torch.Tensor:
    """A tensor over ``memory``, which has to be writable: torch knows no read-only tensors."""
    from arrow_tq import tensors

    return tensors.from_bytes(memory, dtype, tuple(shape))


def can_hold(dtype: np.dtype[np.generic]) -> bool:
    """Whether torch has this dtype: not times, text, records, or the other byte order."""
    return dtype.isnative and dtype.kind in "biufc" and dtype.name not in ("float128", "complex256")


def item_bytes(dtype: str) -> int:
    """Bytes of one value of a torch dtype."""
    from arrow_tq import tensors

    return tensors.item_bytes(dtype)


def rows(memory: Bytes, dtype: str, starts: list[int], ends: list[int]) -> list[object]:
    """Flat tensors of ``memory[start:end]`` (in elements), all over one private copy of it."""
    flat = tensor(memory.copy(), dtype, (len(memory) // item_bytes(dtype),))
    return [flat[start:end] for start, end in zip(starts, ends, strict=True)]
