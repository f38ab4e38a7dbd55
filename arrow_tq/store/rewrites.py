"""Commits steps, telling overlay (equal token ids again) from a rewrite (other ids) on the way.

The comparison reads token ids, four bytes a token, when a step is committed: composing segments later
then needs no payload at all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from arrow_tq.store.catalog import Catalog
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.commands import StepCommit, StepResult
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import Spans, chunk_ids, to_spans

STRIPES = 64
ENDS_KEPT_MAX = 65536
Key = tuple[str, str]


class Rewrites:
    """Serialises the steps of one session, and finds where a step's tokens depart from what was there."""

    def __init__(self, shard: Shard, catalog: Catalog) -> None:
        self._shard = shard
        self._catalog = catalog
        self._stripes = [threading.Lock() for _ in range(STRIPES)]
        self._lock = threading.Lock()
        self._ends: OrderedDict[Key, int] = OrderedDict()
        """Where each session's tokens end, so that plain appends ask nothing of the catalog."""

    def commit(self, steps: Sequence[StepCommit]) -> list[StepResult]:
        """Commit each step atomically by itself; those of one session in the order given."""
        results: list[StepResult | None] = [None] * len(steps)
        waiting = list(range(len(steps)))
        while waiting:
            seen: set[Key] = set()
            batch: list[int] = []
            later: list[int] = []
            for index in waiting:
                key = (steps[index].run, steps[index].session_id)
                (later if key in seen else batch).append(index)
                seen.add(key)
            for index, result in zip(batch, self._round([steps[i] for i in batch]), strict=True):
                results[index] = result
            waiting = later
        return [result for result in results if result is not None]

    def _round(self, steps: Sequence[StepCommit]) -> list[StepResult]:
        """Commit steps of different sessions together."""
        keys = [(step.run, step.session_id) for step in steps]
        with ExitStack() as held:
            for stripe in sorted({hash(key) % STRIPES for key in keys}):
                held.enter_context(self._stripes[stripe])
            rewrites: dict[tuple[str, str, str], int] = {}
            for step in steps:
                place = self._departure(step)
                if place is not None:
                    rewrites[step.run, step.session_id, step.step_id] = place
            results = self._catalog.commit_steps(steps, rewrites)
            for key, step, result in zip(keys, steps, results, strict=True):
                self._remember(key, step, result)
        return results

    def _departure(self, step: StepCommit) -> int | None:
        """First position whose stored token id differs from the one that the step wrote, or None."""
        receipts = [one for one in step.receipts if one.field == TOKEN_FIELD and one.rows]
        if not receipts:
            return None
        start = min(receipt.start for receipt in receipts)
        known = self._ends.get((step.run, step.session_id))
        if known is not None and start >= known:
            return None
        try:
            spans, end = self._catalog.token_spans(step.run, step.session_id)
        except ArrowTQError:
            # The commit itself names what is wrong with the step.
            return None
        if start >= end:
            return None
        return self._compare(spans, receipts)

    def _compare(self, spans: Spans, receipts: Sequence[Receipt]) -> int | None:
        new = to_spans([span for receipt in receipts for span in receipt.spans()])
        for span in new:
            stored = _overlap(spans, int(span["start"]), int(span["start"]) + int(span["rows"]))
            mine = self._tokens(span)
            for old in stored:
                theirs = self._tokens(old)
                first = max(int(old["start"]), int(span["start"]))
                last = min(int(old["start"]) + len(theirs), int(span["start"]) + len(mine))
                ours = mine[first - int(span["start"]) : last - int(span["start"])]
                before = theirs[first - int(old["start"]) : last - int(old["start"])]
                different = np.flatnonzero(ours != before)
                if len(different):
                    return first + int(different[0])
        return None

    def _tokens(self, span: np.void) -> npt.NDArray[np.generic]:
        """Token ids of a span; none where its chunk is gone, which the commit or a fetch will say."""
        (chunk_id,) = chunk_ids(np.array([span]))
        chunk = self._shard.get(chunk_id)
        if chunk is None:
            return np.empty(0, np.int64)
        row, rows = int(span["row"]), int(span["rows"])
        return chunk.values[row : row + rows]

    def _remember(self, key: Key, step: StepCommit, result: StepResult) -> None:
        if result.error is not None:
            return
        end = max((one.end for one in step.receipts if one.field == TOKEN_FIELD), default=0)
        with self._lock:
            self._ends[key] = max(end, self._ends.get(key, 0))
            self._ends.move_to_end(key)
            if len(self._ends) > ENDS_KEPT_MAX:
                self._ends.popitem(last=False)


def _overlap(spans: Spans, start: int, end: int) -> Spans:
    ends = spans["start"] + spans["rows"].astype(np.int64)
    return spans[(spans["start"] < end) & (ends > start)]
