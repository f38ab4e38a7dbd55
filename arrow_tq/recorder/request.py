"""One request of an engine: the rows of its fields, from the first token to its receipts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field as slot
from typing import TYPE_CHECKING, Literal

from arrow_tq.recorder.writers import each_group
from arrow_tq_schemas.errors import ArrowTQError, Conflict, DeadlineExceeded, from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId, IdSeries
from arrow_tq_schemas.receipts import Receipt, StoredChunk

if TYPE_CHECKING:
    from arrow_tq.recorder.recorder import Recorder

Receipts = dict[str, Receipt]
"""By field name."""
Kept = int | Mapping[str, int] | None


@dataclass(slots=True, eq=False)
class Written:
    """A piece on its way, or stored."""

    chunk_id: ChunkId
    start: int
    stored: StoredChunk | None = None


@dataclass(slots=True, eq=False)
class Part:
    """What one request wrote of one field."""

    field: Field
    ids: IdSeries = slot(default_factory=IdSeries)
    shard: int | None = None
    """Of all its chunks: their ids then differ by their count alone."""
    pieces: list[Written] = slot(default_factory=list)


class Request:
    """A request being recorded. Made by ``recorder.begin``; ends with ``finish`` or ``abort``.

    A write that fails in the background does not disturb the scheduler: it is raised by ``finish``, and
    ``error`` shows it before.

    Attributes:
        id: the engine's own id of the request, for messages.
    """

    def __init__(self, recorder: Recorder, request_id: str, slot: int) -> None:
        self.id = request_id
        self.slot = slot
        self.parts: dict[str, Part] = {}
        self.state: Literal["open", "finishing", "finished", "aborted"] = "open"
        self._recorder = recorder
        self._lock = threading.Lock()
        self._unsettled = 0
        self._error: ArrowTQError | None = None
        self._promise: Future[Receipts | None] = Future()
        self._kept: dict[str, tuple[int, int]] = {}
        self._concluded = False

    @property
    def error(self) -> ArrowTQError | None:
        """Why this request cannot finish, as far as is known."""
        return self._error

    def append(self, field: str, start: int, rows: object) -> None:
        """Record rows at positions ``[start, start + len(rows))``; the array is the caller's again after.

        The field's first append says where it starts. Later ones begin at its end, or up to
        ``window_tokens`` before it: what was there is replaced. May wait for room in flight.

        Args:
            field: one of the recorder's fields.
            start: absolute position of the first row.
            rows: ``[rows, *field.shape]``: numpy, nested lists, pyarrow or torch.

        Raises:
            InvalidInput: ``start`` is below the window's floor or beyond the end; names both.
            InvalidField, ValueOutOfRange: as their names say.
            Conflict: the request is over.
        """
        self._recorder.append_one(self, field, start, rows)

    def finish(self, kept: Kept = None, timeout_s: float = 120.0) -> Receipts | None:
        """End the request: trim, write what is left, and wait until all of it is stored.

        Args:
            kept: rows at positions from ``kept`` on are dropped: one end for every field, or one a field;
                None keeps everything.
            timeout_s: how long to wait.

        Returns:
            One receipt a field, for a step to attach; None on ranks that do not own the recording.

        Raises:
            RowCountMismatch: ``kept`` is beyond the rows; names both, and the request goes on.
            StoreFull, Unreachable, ...: a write failed; what the request wrote is freed.
            DeadlineExceeded: not stored in time; the request is aborted.
        """
        promise = self.finish_soon(kept)
        try:
            return promise.result(timeout_s)
        except ArrowTQError:
            raise
        except TimeoutError:
            self.abort()
            raise DeadlineExceeded(f"request {self.id!r}: not stored within {timeout_s:g} s") from None

    def finish_soon(self, kept: Kept = None) -> Future[Receipts | None]:
        """As ``finish``, without waiting for the store: the future has the receipts, or the error.

        For asyncio: ``await asyncio.wrap_future(request.finish_soon(kept))``.
        """
        self._recorder.finish_one(self, kept)
        return self._promise

    def abort(self) -> None:
        """End the request and free what it wrote, in the background. Idempotent."""
        self._recorder.abort_one(self)

    # -- for the recorder ----------------------------------------------------------------------

    def check_open(self, what: str) -> None:
        if self.state != "open":
            raise Conflict(f"{what} on request {self.id!r}: it is {self.state} already", request_id=self.id)

    def expect(self, field: Field, piece: Written) -> None:
        """A piece is about to be written."""
        with self._lock:
            self.parts[field.name].pieces.append(piece)
            self._unsettled += 1

    def part(self, field: Field) -> Part:
        """What it wrote of a field."""
        return self.parts.setdefault(field.name, Part(field))

    def chunk_names(self) -> list[str]:
        """Every chunk so far, of all layer groups."""
        with self._lock:
            return [
                name
                for part in self.parts.values()
                for name in each_group(part.field, [piece.chunk_id for piece in part.pieces])
            ]

    def settle(self, piece: Written, stored: StoredChunk | None, error: ArrowTQError | None) -> None:
        """A piece is stored, or failed."""
        with self._lock:
            self._unsettled -= 1
            piece.stored = stored
            self._error = self._error or error
        self._conclude()

    def end(self, kept: dict[str, tuple[int, int]] | None) -> None:
        """No more pieces come. By field the range that is kept; None: nothing is (an abort)."""
        with self._lock:
            if self._concluded or self.state == "aborted":
                return
            self.state = "aborted" if kept is None else "finishing"
            self._kept = kept or {}
        self._conclude()

    def skip(self) -> None:
        """A request on a rank that does not own the recording: it ends at once, with nothing."""
        self.state = "finished"
        if not self._promise.done():
            self._promise.set_result(None)

    def _conclude(self) -> None:
        """Once everything is settled: free what is not wanted and keep the promise."""
        with self._lock:
            if self.state in ("open", "finished") or self._unsettled or self._concluded:
                return
            self._concluded = True
            if self.state == "finishing":
                self.state = "finished"
            error = self._error
            if self.state == "aborted":
                error = Conflict(f"request {self.id!r} was aborted", request_id=self.id)
            wanted = {} if error is not None else self._kept
            surplus = self._surplus(wanted)
            receipts = {name: self._receipt(name, *span) for name, span in wanted.items()}
        self._recorder.free(surplus)
        # Outside the lock: whoever waits for the promise may call back.
        if error is not None:
            self._promise.set_exception(from_wire(error.to_wire()))
        else:
            self._promise.set_result(receipts)

    def _surplus(self, wanted: dict[str, tuple[int, int]]) -> list[str]:
        """Chunks without a kept row; those whose write failed may be there all the same."""
        names: list[str] = []
        for name, part in self.parts.items():
            end = wanted[name][1] if name in wanted else 0
            names += each_group(part.field, [one.chunk_id for one in part.pieces if one.start >= end])
        return names

    def _receipt(self, name: str, first: int, end: int) -> Receipt:
        part, run = self.parts.get(name), self._recorder.run
        assert run is not None
        pieces = [] if part is None else part.pieces
        chunks = [trimmed(piece.stored, end) for piece in pieces if piece.stored and piece.start < end]
        return Receipt(
            run=run.name, epoch=run.epoch, field=name, start=first, rows=max(end - first, 0), chunks=chunks
        )


def trimmed(chunk: StoredChunk, end: int) -> StoredChunk:
    """The chunk's rows at positions before ``end``."""
    rows = end - chunk.start
    if chunk.rows <= rows:
        return chunk
    valid = chunk.valid
    if valid is not None:
        valid = [(first, min(last, rows)) for first, last in valid if first < rows]
    bytes_ = chunk.bytes // chunk.rows * rows
    return chunk.model_copy(update={"rows": rows, "bytes": bytes_, "valid": valid})
