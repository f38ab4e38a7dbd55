"""Group-relative policy optimisation, as much of it as one update needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CLIP = 0.2
"""How far the ratio of probabilities may move before its gradient is cut."""
SPREAD_MIN = 1e-4
"""Rewards of a group that lie closer than this teach nothing."""


def advantages(rewards: Sequence[float], groups: Sequence[str]) -> npt.NDArray[np.float32]:
    """Each sample's reward relative to its group's, in standard deviations; ``[samples]``."""
    values = np.asarray(rewards, dtype=np.float64)
    _, place = np.unique(np.asarray(groups), return_inverse=True)
    counts = np.bincount(place)
    mean = np.bincount(place, values) / counts
    spread = np.sqrt(np.bincount(place, (values - mean[place]) ** 2) / counts)
    found: npt.NDArray[np.float64] = (values - mean[place]) / (spread[place] + SPREAD_MIN)
    return found.astype(np.float32)


def policy_loss(torch: Any, logprobs: Any, old_logprobs: Any, advantage: Any, mask: Any) -> Any:
    """The clipped surrogate, averaged over the tokens of the mask.

    Args:
        torch: the module.
        logprobs, old_logprobs: ``[sequences, length]`` of the new and of the old policy.
        advantage: ``[sequences]``.
        mask: ``[sequences, length]``, 1 where a token carries loss.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    weight = advantage[:, None]
    surrogate = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
    return -(surrogate * mask).sum() / mask.sum().clamp(min=1)
