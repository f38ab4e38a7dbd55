"""verl: routing and log-probs as padded tensors, or as jagged ones in a ``TensorDict``.

verl keeps ``routed_experts`` as int16 beside ``input_ids``: ``[batch, prompt + response, layers, top-k]``
with prompts padded on the left and zeros where there is no token, or jagged. It has a row a token, although
the last one was never forwarded; ``aligned`` says which rows are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay import rows as expert_rows
from arrow_tq.adapters.replay.samples import LOGPROB_FIELD, SampleValues, sample_values
from arrow_tq.adapters.replay.source import FIELD
from arrow_tq.adapters.replay.switch import Switch
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.errors import InvalidField, InvalidInput, RowCountMismatch, Unsupported
from arrow_tq_schemas.fields import Field

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

ROUTING_DTYPE = "int16"
ROUTING_KEY = "routed_experts"
MASK_KEY = "routed_mask"
LOGPROB_KEY = "rollout_log_probs"


def aligned(
    experts: npt.NDArray[np.generic], tokens: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
    """``[T, layers, top-k]`` and a mask ``[T]`` whose last is False, from T or T-1 rows.

    With T rows the last is zeroed: engines that send one send what was left in a buffer.

    Raises:
        RowCountMismatch: another number of rows; names both counts.
    """
    if experts.ndim != 3 or len(experts) not in (tokens - 1, tokens):
        raise RowCountMismatch(
            f"routing of shape {list(experts.shape)} for {tokens} tokens: expected {tokens - 1} or {tokens} "
            "rows of [layers, top-k]"
        )
    made = np.zeros((tokens, *experts.shape[1:]), experts.dtype)
    made[: tokens - 1] = experts[: tokens - 1]
    mask = np.ones(tokens, np.bool_)
    mask[-1:] = False
    return made, mask


def padded(
    batch: Batch,
    switch: Switch,
    prompt_length: int,
    response_length: int,
    rows: Sequence[int] | None = None,
    logprobs: str = LOGPROB_FIELD,
    routing: str = FIELD,
) -> dict[str, torch.Tensor]:
    """Tensors that stand beside verl's left-padded prompts and right-padded responses.

    ``rollout_log_probs`` float32 ``[batch, response_length]``; with routing ``routed_experts`` int16
    ``[batch, prompt_length + response_length, layers, top-k]`` and ``routed_mask`` bool, True where a row was
    recorded. ``Switch.OFF`` gives none.

    Raises:
        InvalidInput: a prompt or a response is longer than its room.
        InvalidField: ids that int16 does not hold.
    """
    if switch is Switch.OFF:
        return {}
    import torch

    chosen = _chosen(batch, rows)
    values = sample_values(batch, chosen, logprobs)
    starts = [_left(one, prompt_length, response_length) for one in values]
    found = np.zeros((len(values), response_length), np.float32)
    for place, one in enumerate(values):
        found[place, : one.response_length] = one.logprobs
    tensors = {LOGPROB_KEY: torch.from_numpy(found)}
    if switch.has_routing:
        column = batch.fetch([routing], rows=chosen)[routing]
        _check_int16(column.field)
        length = prompt_length + response_length
        experts = np.zeros((len(values), length, *column.field.shape), np.int16)
        mask = np.zeros((len(values), length), np.bool_)
        for place, (start, recorded) in enumerate(zip(starts, column, strict=True)):
            experts[place, start : start + len(recorded)] = recorded
            mask[place, start : start + len(recorded)] = True
        tensors[ROUTING_KEY] = torch.from_numpy(experts)
        tensors[MASK_KEY] = torch.from_numpy(mask)
    return tensors


def jagged(
    batch: Batch,
    switch: Switch,
    rows: Sequence[int] | None = None,
    logprobs: str = LOGPROB_FIELD,
    routing: str = FIELD,
) -> TensorDict:
    """A ``TensorDict`` of jagged nested tensors, a row of T a segment.

    ``input_ids`` int64, ``rollout_log_probs`` float32 (0.0 where nothing was sampled) and, with routing,
    ``routed_experts`` int16 ``[batch, T, layers, top-k]`` with a zero last row and ``routed_mask`` bool.
    ``Switch.OFF`` gives an empty one.

    Raises:
        Unsupported: tensordict is not installed.
        InvalidField: ids that int16 does not hold.
    """
    make = _tensordict()
    chosen = _chosen(batch, rows)
    if switch is Switch.OFF:
        return make({}, batch_size=[len(chosen)])
    import torch

    names = ["token_ids", logprobs, *([routing] if switch.has_routing else [])]
    data = batch.fetch(names, rows=chosen)
    offsets = torch.from_numpy(data.offsets.copy())
    columns = {
        "input_ids": expert_rows.tensor(data["token_ids"].packed, "int64"),
        LOGPROB_KEY: expert_rows.tensor(data[logprobs].packed, "float32"),
    }
    if switch.has_routing:
        _check_int16(data[routing].field)
        last = data.offsets[1:] - 1
        experts = np.array(data[routing].packed, np.int16)
        experts[last] = 0
        mask = np.ones(len(experts), np.bool_)
        mask[last] = False
        columns[ROUTING_KEY] = torch.from_numpy(experts)
        columns[MASK_KEY] = torch.from_numpy(mask)
    nested = {
        name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in columns.items()
    }
    return make(nested, batch_size=[len(chosen)])


def _chosen(batch: Batch, rows: Sequence[int] | None) -> list[int]:
    return list(range(len(batch))) if rows is None else [int(row) for row in rows]


def _left(values: SampleValues, prompt_length: int, response_length: int) -> int:
    """Where the sample's first token stands behind the padding of its prompt."""
    prompt = len(values.tokens) - values.response_length
    if prompt > prompt_length or values.response_length > response_length:
        raise InvalidInput(
            f"a prompt of {prompt} and a response of {values.response_length} tokens: there is room for "
            f"{prompt_length} and {response_length}"
        )
    return prompt_length - prompt


def _check_int16(field: Field) -> None:
    if expert_rows.replayable(field) - 1 > np.iinfo(np.int16).max:
        raise InvalidField(f"field {field.name!r}: {field.num_experts} experts do not fit int16")


def _tensordict() -> type[TensorDict]:
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise Unsupported(f"jagged tensors need tensordict ({error}): pip install tensordict") from None
    made: type[TensorDict] = TensorDict
    return made
