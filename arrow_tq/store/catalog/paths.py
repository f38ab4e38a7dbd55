"""Paths from a root to a step: the token ids that they show, and where their fields end."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import apsw
import numpy as np

from arrow_tq.intervals import clip, overlay
from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import Spans, empty_spans, to_spans

State = TypeVar("State")


@dataclass(frozen=True, slots=True, eq=False)
class TokenPath:
    """Spans of the token ids that a path shows: ascending, not overlapping; and their end."""

    spans: Spans
    end: int


@dataclass(frozen=True, slots=True)
class _StepRow:
    rewrite_at: int | None
    receipts: list[Receipt]


class TokenPaths:
    """A bounded cache of token paths by their last step; each goes on from the longest one that is there."""

    def __init__(self, paths_cached_max: int, spans_cached_max: int) -> None:
        self._paths_cached_max = paths_cached_max
        self._spans_cached_max = spans_cached_max
        self._paths: OrderedDict[tuple[int, str], TokenPath] = OrderedDict()
        self._spans = 0
        self._lock = threading.Lock()

    def read(self, connection: apsw.Connection, session: int, step: str | None) -> TokenPath:
        """What the path to ``step`` shows; None: nothing, there is no step before."""
        if step is None:
            return TokenPath(empty_spans(), 0)
        path = self._get(session, step)
        if path is None:

            def known(step: str) -> TokenPath | None:
                return self._get(session, step)

            path = _follow(connection, session, step, known, _lay, TokenPath(empty_spans(), 0))
            self._keep(session, step, path)
        return path

    def _get(self, session: int, step: str) -> TokenPath | None:
        with self._lock:
            found = self._paths.get((session, step))
            if found is not None:
                self._paths.move_to_end((session, step))
            return found

    def _keep(self, session: int, step: str, path: TokenPath) -> None:
        with self._lock:
            if (session, step) in self._paths:
                return
            self._paths[session, step] = path
            self._spans += len(path.spans)
            while len(self._paths) > self._paths_cached_max or self._spans > self._spans_cached_max:
                self._spans -= len(self._paths.popitem(last=False)[1].spans)


def path_ends(connection: apsw.Connection, session: int, step: str | None) -> dict[str, int]:
    """By field, the largest end of what the path to ``step`` shows; what a rewrite dropped is not there."""
    if step is None:
        return {}

    def lay(ends: dict[str, int], row: _StepRow) -> dict[str, int]:
        if row.rewrite_at is not None:
            ends = {field: min(end, row.rewrite_at) for field, end in ends.items()}
        for receipt in row.receipts:
            if receipt.rows:
                ends[receipt.field] = max(ends.get(receipt.field, 0), receipt.end)
        return ends

    start: dict[str, int] = {}
    return _follow(connection, session, step, lambda _: None, lay, start)


def _follow(
    connection: apsw.Connection,
    session: int,
    step: str,
    known: Callable[[str], State | None],
    lay: Callable[[State, _StepRow], State],
    start: State,
) -> State:
    """Lay the steps from a root, or from the nearest one whose state is known, to ``step``."""
    blobs: list[tuple[int | None, bytes]] = []
    state: State | None = None
    at: str | None = step
    while at is not None and (state := known(at)) is None:
        row: Any = connection.execute(
            "SELECT parent_id, rewrite_at, receipts FROM steps WHERE session = ? AND step_id = ?",
            (session, at),
        ).fetchone()
        at, rewrite_at, blob = row
        blobs.append((rewrite_at, blob))
    laid = start if state is None else state
    for rewrite_at, blob in reversed(blobs):
        laid = lay(laid, _StepRow(rewrite_at, decode_receipts(blob, "", 0)))
    return laid


def _lay(path: TokenPath, row: _StepRow) -> TokenPath:
    """A rewrite drops what was at its position and after; later rows cover earlier ones."""
    spans, end = path.spans, path.end
    if row.rewrite_at is not None:
        spans, end = clip(spans, 0, row.rewrite_at), min(end, row.rewrite_at)
    written = [one for one in row.receipts if one.field == TOKEN_FIELD and one.rows]
    if written:
        new = to_spans([span for receipt in written for span in receipt.spans()])
        spans = overlay(np.concatenate([spans, new]), "last")
        end = max(end, *(receipt.end for receipt in written))
    return TokenPath(spans, end)
