"""Commits steps, telling overlay (equal token ids again) from a rewrite (other ids) on the way.

The comparison reads token ids, four bytes a token, when a step is committed: composing segments later
then needs no payload at all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from arrow_tq.store.catalog import Catalog
from arrow_tq.store.catalog.tree import ROOT
from arrow_tq.store.catalog.writer import Beside
from arrow_tq.store.holding import ChunkHolder
from arrow_tq_schemas.commands import StepCommit, StepResult, Wire
from arrow_tq_schemas.errors import ArrowTQError, Unavailable
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import Spans, chunk_ids, to_spans

STRIPES = 64
ENDS_KEPT_MAX = 65536
Key = tuple[str, str]
"""Run and session."""
Value = TypeVar("Value")


class _Recent(Generic[Value]):
    """A bounded table of what was used last. For callers that hold a lock."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._kept_max:
            self._values.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        self._values.pop(key, None)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is known of where a step goes."""

    end: int | None = None
    """Where the tokens before it end; None: not known."""
    steps: int | None = None
    """Steps of the session before it; None: not known."""
    rewrite_at: int | None = None
    problem: ArrowTQError | None = None
    """The tokens before it cannot be looked at now."""


class Rewrites:
    """Serialises the steps of one session, and finds where a step's tokens depart from its path's."""

    def __init__(self, shard: ChunkHolder, catalog: Catalog) -> None:
        self._shard = shard
        self._catalog = catalog
        self._stripes = [threading.Lock() for _ in range(STRIPES)]
        self._lock = threading.Lock()
        self._ends: _Recent[int] = _Recent(ENDS_KEPT_MAX)
        """Where the tokens of the path to a step end, so that plain appends ask nothing of the catalog."""
        self._last: _Recent[tuple[int, str]] = _Recent(ENDS_KEPT_MAX)
        """Index and id of each session's last step; -1 and ``ROOT`` where it has none."""

    def created(self, run: str, session_id: str) -> None:
        """A session that has no step yet: its first one asks nothing of the catalog."""
        with self._lock:
            self._last.put((run, session_id), (-1, ROOT))

    @contextmanager
    def changing(self, run: str, session_id: str) -> Iterator[None]:
        """Hold back the session's steps while its tree is changed in another way than by a commit."""
        key = (run, session_id)
        with self._stripes[hash(key) % STRIPES]:
            try:
                yield
            finally:
                with self._lock:
                    self._last.drop(key)

    def commit(self, steps: Sequence[StepCommit], beside: Beside[Wire] | None = None) -> list[StepResult]:
        """Commit each step atomically by itself; those of one session in the order given.

        Args:
            beside: operations on other sessions, for the same transaction, if there is one.
        """
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
            for index, result in zip(batch, self._round([steps[i] for i in batch], beside), strict=True):
                results[index] = result
            waiting, beside = later, None
        return [result for result in results if result is not None]

    def _round(self, steps: Sequence[StepCommit], beside: Beside[Wire] | None) -> list[StepResult]:
        """Commit steps of different sessions together."""
        keys = [(step.run, step.session_id) for step in steps]
        with ExitStack() as held:
            for stripe in sorted({hash(key) % STRIPES for key in keys}):
                held.enter_context(self._stripes[stripe])
            places = [self._look(step) for step in steps]
            rewrites = {
                (step.run, step.session_id, step.step_id): place.rewrite_at
                for step, place in zip(steps, places, strict=True)
                if place.rewrite_at is not None
            }
            able = [step for step, place in zip(steps, places, strict=True) if place.problem is None]
            answers = iter(self._catalog.commit_steps(able, rewrites, beside))
            results = [
                _refused(step, place) or next(answers) for step, place in zip(steps, places, strict=True)
            ]
            for step, place, result in zip(steps, places, results, strict=True):
                self._remember(step, place, result)
        return results

    def _look(self, step: StepCommit) -> _Place:
        """Where the step goes, and the first position whose stored token id differs from its own."""
        known = self._known(step)
        receipts = [one for one in step.receipts if one.field == TOKEN_FIELD and one.rows]
        if not receipts:
            return known
        start = min(receipt.start for receipt in receipts)
        if known.end is not None and known.steps is not None and start >= known.end:
            return known
        try:
            path, count = self._catalog.token_path(step)
        except ArrowTQError:
            # The commit itself names what is wrong with the step.
            return known
        try:
            rewrite_at = self._compare(path.spans, receipts) if start < path.end else None
        except Unavailable as error:
            return _Place(problem=error)
        return _Place(path.end, count, rewrite_at)

    def _known(self, step: StepCommit) -> _Place:
        """What a step's place is without asking the catalog."""
        with self._lock:
            last = self._last.get((step.run, step.session_id))
            if last is None or step.retry_of is not None:
                return _Place()
            parent = last[1] if step.parent is None else step.parent
            end = 0 if parent == ROOT else self._ends.get((step.run, step.session_id, parent))
            return _Place(end, last[0] + 1)

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

    def _remember(self, step: StepCommit, place: _Place, result: StepResult) -> None:
        if result.error is not None:
            return
        with self._lock:
            if place.steps is None:
                # It may be the last one now, or one that was committed before and is answered again.
                self._last.drop((step.run, step.session_id))
                return
            if result.step_index < place.steps:
                return
            self._last.put((step.run, step.session_id), (result.step_index, step.step_id))
            if place.end is not None:
                ends = [one.end for one in step.receipts if one.field == TOKEN_FIELD and one.rows]
                before = place.end if place.rewrite_at is None else min(place.end, place.rewrite_at)
                self._ends.put((step.run, step.session_id, step.step_id), max([before, *ends]))


def _refused(step: StepCommit, place: _Place) -> StepResult | None:
    return None if place.problem is None else StepResult(step_id=step.step_id, error=place.problem.to_wire())


def _overlap(spans: Spans, start: int, end: int) -> Spans:
    ends = spans["start"] + spans["rows"].astype(np.int64)
    return spans[(spans["start"] < end) & (ends > start)]
