"""Where the rows of a fetch come from: its segments, their lengths, and which of their tokens are whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.trainer.versions import Versions
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.manifests import Manifest

Ranges = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The segments of a fetch, in order.

    Attributes:
        segment_ids: their ids.
        offsets: ``[segments + 1]`` int64, where each segment's T rows begin in a packed buffer.
        sampled: by segment, ``[n, 2]`` int64 ranges of positions that were sampled.
        loss: by segment, ``[n, 2]`` int64 ranges of the sampled tokens that carry loss in it.
        versions: which weight version sampled each token.
    """

    segment_ids: tuple[str, ...]
    offsets: npt.NDArray[np.int64]
    sampled: tuple[Ranges, ...]
    loss: tuple[Ranges, ...]
    versions: Versions

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> Origin:
        lengths = np.array([manifest.num_tokens for manifest in manifests], dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return cls(
            tuple(manifest.segment_id for manifest in manifests),
            offsets,
            tuple(manifest.sampled for manifest in manifests),
            tuple(manifest.loss for manifest in manifests),
            Versions.of(manifests, offsets),
        )

    @property
    def tokens(self) -> int:
        """T of all segments together."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """``[segments]`` int64, each T."""
        return np.diff(self.offsets)

    def rows(self, field: Field) -> npt.NDArray[np.int64]:
        """``[segments]`` int64, rows of each segment's own array: T, or T - 1 where forwarded."""
        return np.maximum(self.lengths - 1, 0) if field.domain == "forwarded" else self.lengths

    def response_starts(self) -> npt.NDArray[np.int64]:
        """``[segments]`` int64, the first sampled position; T where nothing was sampled."""
        firsts = [
            int(ranges[0, 0]) if len(ranges) else int(length)
            for ranges, length in zip(self.sampled, self.lengths, strict=True)
        ]
        return np.array(firsts, dtype=np.int64)

    def mask(self, ranges: Sequence[Ranges]) -> npt.NDArray[np.uint8]:
        """``[sum of T]`` uint8, 1 inside each segment's ranges."""
        out = np.zeros(self.tokens, dtype=np.uint8)
        for offset, some in zip(self.offsets.tolist(), ranges, strict=False):
            for start, end in some.tolist():
                out[offset + start : offset + end] = 1
        return out
