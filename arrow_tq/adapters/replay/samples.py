"""A batch's segments as response-only values, the way that frameworks keep a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.trainer.batch import Batch
from arrow_tq.trainer.data import Data
from arrow_tq_schemas.errors import Hole
from arrow_tq_schemas.fields import TOKEN_FIELD

LOGPROB_FIELD = "logprobs"


@dataclass(frozen=True, slots=True, eq=False)
class SampleValues:
    """One segment. Prompt tokens come first; the response begins at the first sampled token.

    Attributes:
        tokens: int64 ``[T]``, prompt and response.
        response_length: R.
        loss_mask: int32 ``[R]``, 1 where this segment carries the token's loss; tool tokens are 0.
        logprobs: float32 ``[R]`` of the rollout engine, 0.0 at tool tokens; None where they were not asked.
        versions: weight versions of the response's tokens, each once, in order.
    """

    tokens: npt.NDArray[np.int64]
    response_length: int
    loss_mask: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    versions: tuple[str, ...]


def sample_values(
    batch: Batch,
    rows: Sequence[int] | None = None,
    logprobs: str | None = LOGPROB_FIELD,
    expect_tokens: Sequence[npt.NDArray[np.generic]] | None = None,
) -> list[SampleValues]:
    """The values of these rows of the batch (None: all), in their order.

    Args:
        logprobs: the field of the rollout engine's log-probs; None leaves them where they are.
        expect_tokens: token ids that the caller has, one array a row, to be sure that they are these.

    Raises:
        Misaligned: stored token ids differ from ``expect_tokens``.
        Hole: nothing of a segment was sampled, so it has no response.
    """
    names = [TOKEN_FIELD] if logprobs is None else [TOKEN_FIELD, logprobs]
    data = batch.fetch(names, rows=rows, expect_tokens=expect_tokens)
    mask = np.split(data.loss_mask().astype(np.int32), data.offsets[1:-1])
    made = []
    for place, start in enumerate(response_starts(data)):
        tokens = data[TOKEN_FIELD][place].astype(np.int64)
        values = None if logprobs is None else data.response(logprobs)[place].astype(np.float32)
        made.append(
            SampleValues(tokens, len(tokens) - start, mask[place][start:], values, _versions(data, place))
        )
    return made


def response_starts(data: Data) -> list[int]:
    """Position of each segment's first sampled token. Raises ``Hole`` where one has none."""
    starts = data.origin.response_starts()
    empty = np.flatnonzero(starts == data.origin.lengths)
    if len(empty):
        name = data.origin.segment_ids[int(empty[0])]
        raise Hole(f"segment {name!r}: no token of it was sampled, so it has no response", segment_id=name)
    return [int(start) for start in starts]


def _versions(data: Data, place: int) -> tuple[str, ...]:
    """The versions that sampled the segment's tokens, each once, in order of appearance."""
    known = data.versions[place]
    numbers, first = np.unique(known[known >= 0], return_index=True)
    return tuple(data.versions.names[int(numbers[at])] for at in np.argsort(first))
