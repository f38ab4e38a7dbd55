"""Two attempts of one step: the second to commit is answered as a retry only if it wrote the same tokens.

Chunk ids are never shared by attempts, so a late drop or put of one cannot touch the other's. What is left
is a commit under the id of a step that is there: equal tokens make it a retry, others a different step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.store.catalog import Catalog
from arrow_tq.store.holding import ChunkHolder
from arrow_tq_schemas.commands import StepCommit, StepResult
from arrow_tq_schemas.errors import Conflict, Unavailable
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.receipts import Receipt, chunk_ids, joined


class Attempts:
    """Looks at steps that were answered without being committed."""

    def __init__(self, shard: ChunkHolder, catalog: Catalog) -> None:
        self._shard = shard
        self._catalog = catalog

    def check(self, steps: Sequence[StepCommit], results: Sequence[StepResult]) -> list[StepResult]:
        """The results, with an error for each step whose tokens are not those stored under its id."""
        return [self._check(step, result) for step, result in zip(steps, results, strict=True)]

    def _check(self, step: StepCommit, result: StepResult) -> StepResult:
        mine = _of_tokens(step.receipts)
        if result.error is not None or not mine or self._shard.is_pinned(mine[0].chunks[0].chunk_id):
            return result
        # Its own chunks are attached to nothing: an earlier commit of this id was its answer.
        stored = _of_tokens(self._catalog.step_receipts(step.run, step.session_id, step.step_id))
        try:
            position = self._departure(stored, mine)
        except Unavailable as away:
            return StepResult(step_id=step.step_id, error=away.to_wire())
        if position is None:
            # The same rows, stored twice: these ones nobody will attach.
            self._shard.free(step.run, chunk_ids(step.receipts))
            return result
        error = Conflict(
            f"step {step.step_id!r} of session {step.session_id!r} is committed by another attempt with "
            f"other tokens, first at position {position}",
            step_id=step.step_id,
            position=position,
        )
        return StepResult(step_id=step.step_id, error=error.to_wire())

    def _departure(self, stored: Sequence[Receipt], mine: Sequence[Receipt]) -> int | None:
        # Either may have put the same rows in other pieces.
        for old, new in zip(joined(stored), joined(mine), strict=True):
            before, now = self._tokens(old), self._tokens(new)
            if before is None or now is None:
                # Released since: nothing is left to compare.
                continue
            different = np.flatnonzero(before != now)
            if len(different):
                return old.start + int(different[0])
        return None

    def _tokens(self, receipt: Receipt) -> npt.NDArray[np.generic] | None:
        parts = []
        for stored in receipt.chunks:
            chunk = self._shard.get(stored.chunk_id)
            if chunk is None:
                return None
            parts.append(chunk.values[: stored.rows])
        return np.concatenate(parts)


def _of_tokens(receipts: Sequence[Receipt]) -> list[Receipt]:
    return [receipt for receipt in receipts if receipt.field == TOKEN_FIELD and receipt.rows]
