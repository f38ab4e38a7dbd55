"""Torch tensors over fetched arrays. The only module of the library that imports torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from arrow_tq_schemas.errors import InvalidField


def from_storage(values: npt.NDArray[np.generic], dtype: str, wanted: str | None = None) -> torch.Tensor:
    """A tensor of ``values`` (any shape), whose logical dtype is ``dtype``.

    Args:
        values: storage array; shared with the tensor where no conversion is needed.
        dtype: logical dtype, such as ``bfloat16`` for uint16 bits.
        wanted: torch dtype by name; None keeps the logical dtype (uint16 and uint32, which torch hardly
            computes with, become int32 and int64).

    Raises:
        InvalidField: torch has no dtype called ``wanted``.
    """
    target = None if wanted is None else getattr(torch, wanted, None)
    if wanted is not None and not isinstance(target, torch.dtype):
        raise InvalidField(f"dtype {wanted!r}: torch has none of that name")
    if not values.flags.writeable:
        # torch would warn, and writes through the tensor would reach read-only memory.
        values = values.copy()
    if dtype == "bfloat16":
        tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    elif dtype == "bool":
        tensor = torch.from_numpy(values.view(np.bool_))
    elif values.dtype == np.uint16:
        tensor = torch.from_numpy(values.astype(np.int32))
    elif values.dtype in (np.uint32, np.uint64):
        tensor = torch.from_numpy(values.astype(np.int64))
    else:
        tensor = torch.from_numpy(values)
    return tensor if target is None else tensor.to(target)
