"""The token ids that a session's current path shows, kept in memory so that each step costs its own rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import apsw
import numpy as np

from arrow_tq.intervals import clip, overlay
from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq.store.catalog.runs import RunRecord
from arrow_tq.store.catalog.sessions import get_session
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.spans import Spans, empty_spans, to_spans


@dataclass(frozen=True, slots=True, eq=False)
class TokenPath:
    """Spans of token ids after a session's first ``steps`` steps: ascending, not overlapping."""

    steps: int
    spans: Spans
    end: int


class TokenPaths:
    """A bounded cache of token paths; each is brought up to date from the steps that came since."""

    def __init__(self, paths_cached_max: int) -> None:
        self._paths_cached_max = paths_cached_max
        self._paths: OrderedDict[int, TokenPath] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, connection: apsw.Connection, run: RunRecord, session_id: str) -> TokenPath:
        """Raises ``NotFound`` for an unknown session."""
        session = get_session(connection, run, session_id)
        with self._lock:
            path = self._paths.get(session.id)
        if path is None or path.steps > session.steps:
            path = TokenPath(0, empty_spans(), 0)
        if path.steps < session.steps:
            path = _extend(connection, session.id, path)
        with self._lock:
            self._paths[session.id] = path
            self._paths.move_to_end(session.id)
            while len(self._paths) > self._paths_cached_max:
                self._paths.popitem(last=False)
        return path


def _extend(connection: apsw.Connection, session: int, path: TokenPath) -> TokenPath:
    """A rewrite drops what was at its position and after; later rows cover earlier ones."""
    steps, spans, end = path.steps, path.spans, path.end
    rows = connection.execute(
        "SELECT rewrite_at, receipts FROM steps WHERE session = ? AND step_index >= ? ORDER BY step_index",
        (session, path.steps),
    )
    for rewrite_at, blob in rows:
        steps += 1
        if rewrite_at is not None:
            spans, end = clip(spans, 0, rewrite_at), min(end, rewrite_at)
        written = [one for one in decode_receipts(blob, "", 0) if one.field == TOKEN_FIELD and one.rows]
        if written:
            new = to_spans([span for receipt in written for span in receipt.spans()])
            spans = overlay(np.concatenate([spans, new]), "last")
            end = max(end, *(receipt.end for receipt in written))
    return TokenPath(steps, spans, end)
