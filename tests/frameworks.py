"""A claimed batch of made-up rollouts, and the truth of each row, for the adapters' tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import arrow_tq
from arrow_tq.interface import Store
from arrow_tq.testing.rollouts import LAYER_IDS, Rollout
from arrow_tq.testing.scenes import fill, open_run
from arrow_tq.trainer.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Attributes: batch of ``len(truth)`` segments; truth: the rollout behind each row."""

    store: Store
    batch: Batch
    truth: list[Rollout]

    def prompt(self, row: int) -> int:
        """Tokens before the first sampled one."""
        return self.truth[row].turns[0][1]


def claimed(store: Store, count: int = 5, run: str = "demo") -> Scene:
    opened = open_run(store, run)
    kept = fill(opened, count)
    batch = opened.claim(count)
    return Scene(store, batch, [kept[name] for name in batch.segment_ids])


def embedded(path: Path, count: int = 5) -> Scene:
    return claimed(arrow_tq.open(path), count)


__all__ = ["LAYER_IDS", "Scene", "claimed", "embedded"]
