"""SkyRL: numpy ``[tokens, layers, top-k]`` a sample, and its wire form ``{data, shape, dtype}``."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay.samples import LOGPROB_FIELD, sample_values
from arrow_tq.adapters.replay.source import FIELD
from arrow_tq.adapters.replay.switch import Switch
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.errors import MalformedMessage

DTYPES = ("uint8", "int16", "uint16", "int32", "int64")


class Wire(TypedDict):
    """An array in JSON: base64 of its C-order little-endian bytes."""

    data: str
    shape: list[int]
    dtype: str


class Outputs(TypedDict, total=False):
    """Columns of SkyRL's generator output that the store holds, one entry a sample."""

    rollout_logprobs: list[list[float]]
    rollout_expert_indices: list[npt.NDArray[np.int32]]


def outputs(
    batch: Batch,
    switch: Switch,
    rows: Sequence[int] | None = None,
    logprobs: str = LOGPROB_FIELD,
    routing: str = FIELD,
) -> Outputs:
    """Log-probs of the responses and, with routing, int32 ``[T-1, layers, top-k]``. ``OFF`` gives none."""
    made: Outputs = {}
    if switch.has_logprobs:
        values = sample_values(batch, rows, logprobs)
        made["rollout_logprobs"] = [[] if one.logprobs is None else one.logprobs.tolist() for one in values]
    if switch.has_routing:
        column = batch.fetch([routing], rows=rows)[routing]
        made["rollout_expert_indices"] = [np.ascontiguousarray(one, np.int32) for one in column]
    return made


def encode(experts: npt.NDArray[np.integer]) -> Wire:
    """The wire form; keeps the dtype."""
    little = np.ascontiguousarray(experts, experts.dtype.newbyteorder("<"))
    return Wire(
        data=base64.b64encode(little.data).decode("ascii"),
        shape=list(experts.shape),
        dtype=experts.dtype.name,
    )


def decode(wire: Wire) -> npt.NDArray[np.integer]:
    """The array of a wire form, read-only.

    Raises:
        MalformedMessage: another dtype, a shape that is not [tokens, layers, top-k], or bytes that it
            does not describe.
    """
    name, shape = wire["dtype"].removeprefix("torch."), wire["shape"]
    if name not in DTYPES:
        raise MalformedMessage(f"routing of dtype {wire['dtype']!r}: expected one of {', '.join(DTYPES)}")
    if len(shape) != 3 or any(type(extent) is not int or extent < 0 for extent in shape):
        raise MalformedMessage(f"routing of shape {shape}: expected [tokens, layers, top-k]")
    try:
        raw = base64.b64decode(wire["data"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedMessage(f"routing: its data is not base64: {error}") from None
    dtype = np.dtype(name).newbyteorder("<")
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise MalformedMessage(f"routing: {len(raw)} bytes for {name} of shape {shape}")
    found: npt.NDArray[np.integer] = np.frombuffer(raw, dtype).reshape(shape)
    return found
