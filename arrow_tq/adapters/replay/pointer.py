"""What travels in place of a batch's payload: a few hundred bytes that any process can open."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arrow_tq.tokens import TOKEN_VARIABLE
from arrow_tq_schemas.errors import InvalidInput

if TYPE_CHECKING:
    from types import TracebackType

    from arrow_tq.interface import Store
    from arrow_tq.trainer.batch import Batch


@dataclass(frozen=True, slots=True)
class BatchPointer:
    """Names a claimed batch of a store that others can reach.

    Args:
        url: of the server.
        run: the run's name.
        ref: the batch's ``ref``.
        rank, world: as which rank to attach; see ``at``.
    """

    url: str
    run: str
    ref: str
    rank: int | None = None
    world: int | None = None

    @classmethod
    def of(cls, batch: Batch) -> BatchPointer:
        """The pointer to a batch of this process."""
        return cls(batch.run.backend.url, batch.run.name, batch.ref, batch.rank, batch.world)

    def at(self, rank: int, world: int) -> BatchPointer:
        """The same batch, to be attached as one of ``world`` ranks. Each of them must release it."""
        return replace(self, rank=rank, world=world)

    def open(self, token: str | None = None) -> AttachedBatch:
        """Connect and attach.

        Args:
            token: bearer token; the environment's ``ARROW_TQ_TOKEN`` when left out.

        Raises:
            InvalidInput: no rank was given.
            Unreachable: nobody answers at ``url``.
            ClaimGone: the claim ended.
        """
        import arrow_tq

        if self.rank is None or self.world is None:
            raise InvalidInput(
                f"batch of run {self.run!r}: say as which rank to attach: pointer.at(rank, world)"
            )
        store = arrow_tq.connect(self.url, token or os.environ.get(TOKEN_VARIABLE))
        try:
            batch = store.run(self.run).attach(self.ref, self.rank, self.world)
        except BaseException:
            store.close()
            raise
        return AttachedBatch(store, batch)


class AttachedBatch:
    """A batch and the connection that it came over. Closing does not release the batch."""

    def __init__(self, store: Store, batch: Batch) -> None:
        self._store = store
        self.batch = batch

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Batch:
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
