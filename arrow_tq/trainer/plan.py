"""``batch.plan``: this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from arrow_tq.trainer.micro import MicroBatch
from arrow_tq.trainer.packing import Bins, PlanPolicy
from arrow_tq.trainer.prefetch import AHEAD_BYTES, Prefetch

if TYPE_CHECKING:
    from arrow_tq.trainer.batch import Batch


class Plan(Sequence[MicroBatch]):
    """The micro-batches of one rank, in the order to train them. Made by ``batch.plan``.

    Every segment of the plan is in exactly one micro-batch of one rank (padding aside), every rank has
    ``len(plan)`` of them, and every rank computes the same ``rows_by_rank``. Can be iterated again.

    Attributes:
        rank, world: whose part it is.
        max_tokens: tokens of one micro-batch at most.
        rows_by_rank: by rank and micro-batch, rows of the batch's table. All ranks' parts, not only ours.
    """

    def __init__(
        self,
        batch: Batch,
        rows_by_rank: list[Bins],
        rank: int,
        max_tokens: int,
        policy: PlanPolicy,
    ) -> None:
        self.rank = rank
        self.world = len(rows_by_rank)
        self.max_tokens = max_tokens
        self.rows_by_rank = rows_by_rank
        self._micros = [
            _micro(batch, rows, number, rows_by_rank[rank], policy)
            for number, rows in enumerate(rows_by_rank[rank])
        ]

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...

    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        return self._micros[index]

    def __len__(self) -> int:
        return len(self._micros)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._micros)

    def prefetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> Prefetch:
        """Iterate as ``(micro, data)``, the next ones fetched in the background; see ``Prefetch``."""
        return Prefetch(self._micros, fields, layers, ahead_bytes)

    def __repr__(self) -> str:
        return f"Plan({len(self)} micro-batches for rank {self.rank} of {self.world})"


def _micro(batch: Batch, rows: list[int], number: int, all_rows: Bins, policy: PlanPolicy) -> MicroBatch:
    padding = not rows and policy.short == "repeat"
    if padding:
        own = [row for micro in all_rows for row in micro] or list(range(len(batch)))
        tokens = batch.num_tokens
        rows = [min(own, key=lambda row: (int(tokens[row]), row))]
    return MicroBatch(batch, rows, number, padding)
