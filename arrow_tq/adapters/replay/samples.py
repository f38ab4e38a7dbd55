"""A batch's segments as response-only values, the way that frameworks keep a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.trainer import segments
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.errors import Hole
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.manifests import Manifest

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
    chosen = list(range(len(batch))) if rows is None else [int(row) for row in rows]
    names = [TOKEN_FIELD] if logprobs is None else [TOKEN_FIELD, logprobs]
    data = batch.fetch(names, rows=chosen, expect_tokens=expect_tokens)
    _, manifests = segments.load(
        batch.run.backend, batch.run.name, [batch.segment_ids[row] for row in chosen]
    )
    made = []
    for place, manifest in enumerate(manifests):
        start = response_start(manifest)
        tokens = data[TOKEN_FIELD][place].astype(np.int64)
        values = None if logprobs is None else data[logprobs][place][start:].astype(np.float32)
        versions = tuple(dict.fromkeys(version for _, _, version in manifest.versions))
        made.append(SampleValues(tokens, len(tokens) - start, loss_mask(manifest)[start:], values, versions))
    return made


def response_start(manifest: Manifest) -> int:
    """Position of the first sampled token. Raises ``Hole`` where nothing was sampled."""
    if not len(manifest.sampled):
        raise Hole(
            f"segment {manifest.segment_id!r}: no token of it was sampled, so it has no response",
            segment_id=manifest.segment_id,
        )
    return int(manifest.sampled[:, 0].min())


def loss_mask(manifest: Manifest) -> npt.NDArray[np.int32]:
    """int32 ``[T]``: 1 where the segment carries the token's loss."""
    mask = np.zeros(manifest.num_tokens, np.int32)
    for start, end in manifest.loss.tolist():
        mask[start:end] = 1
    return mask
