"""Rows of expert ids on their way into a router: placed, padded, checked, made tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay.layout import PAD, Index
from arrow_tq_schemas.errors import InvalidField, ValueOutOfRange
from arrow_tq_schemas.fields import Field

if TYPE_CHECKING:
    import torch

Experts = npt.NDArray[np.generic]
"""``[rows, layers, top-k]`` expert ids of any integer dtype."""


def replayable(field: Field) -> int:
    """How many experts the field's ids may name.

    Raises:
        InvalidField: the field is no ``[layers, top-k]`` of expert ids.
    """
    if field.layer_axis != 0 or len(field.shape) != 2 or field.num_experts is None:
        raise InvalidField(
            f"field {field.name!r}: expected [layers, top-k] with layer_axis 0 and num_experts, got shape "
            f"{list(field.shape)}, layer_axis {field.layer_axis}, num_experts {field.num_experts}",
            field=field.name,
        )
    if field.num_experts < field.shape[1]:
        raise InvalidField(f"field {field.name!r}: top {field.shape[1]} of {field.num_experts} experts")
    return field.num_experts


def place(packed: Experts, index: Index, num_experts: int) -> Experts:
    """The rows of ``packed`` that ``index`` names; one copy. Padding rows get experts in rotation.

    A padding row must still be a routing: top-k different experts, or a dispatcher that counts on top-k
    choices a token comes up short. Rotating them keeps padding from piling up on expert 0.
    """
    taken = packed.take(np.maximum(index, 0), axis=0)
    pads = np.flatnonzero(index == PAD)
    if len(pads):
        topk = packed.shape[2]
        spread = (np.arange(len(pads))[:, None] * topk + np.arange(topk)) % num_experts
        taken[pads] = spread[:, None, :].astype(taken.dtype)
    return taken


def check(experts: Experts, num_experts: int, layers: Sequence[int], where: str) -> None:
    """Refuse ids that a router would gather with: nothing after this looks at them again.

    Raises:
        ValueOutOfRange: naming layer, row, value and the range.
    """
    ids = cast("npt.NDArray[np.integer]", experts)
    if not ids.size or (ids.dtype.kind == "u" and np.iinfo(ids.dtype).max < num_experts):
        return
    if ids.min() >= 0 and ids.max() < num_experts:
        return
    row, layer, slot = (int(at) for at in np.argwhere((ids < 0) | (ids >= num_experts))[0])
    value = int(ids[row, layer, slot])
    hint = " (-1 marks a row that was not recorded)" if value == -1 else ""
    raise ValueOutOfRange(
        f"{where}: layer {layers[layer]}, row {row}: expert {value}, expected 0 to {num_experts - 1}{hint}",
        layer=layers[layer],
        row=row,
        value=value,
    )


def tensor(values: Experts, dtype: str, device: str | None = None) -> torch.Tensor:
    """A contiguous tensor of ``dtype`` (``int32``, ``int64``, ``int16``); widened before torch sees it.

    torch has hardly any arithmetic on uint16, so no such tensor is ever made.
    """
    import torch

    made = torch.from_numpy(np.array(values, np.dtype(dtype), order="C"))
    return made if device is None else made.to(device)
