"""``Recorder``: takes rows inside an engine's scheduler and writes them where they are born."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.producer.encode import rows_per_chunk
from arrow_tq.recorder.keeper import Keeper
from arrow_tq.recorder.request import Kept, Request, Written
from arrow_tq.recorder.room import Room
from arrow_tq.recorder.rows import Positions, narrow
from arrow_tq.recorder.stats import RecorderStats
from arrow_tq.recorder.window import CHUNK_ROWS_MAX, Piece, Windows
from arrow_tq.recorder.writers import Writers
from arrow_tq_schemas.errors import (
    ArrowTQError,
    Busy,
    Conflict,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    RowCountMismatch,
)

if TYPE_CHECKING:
    from arrow_tq.runs import Run


class Recorder:
    """Records fields of a run from inside an engine. Its calls are serialised: one scheduler loop is meant.

    Args:
        run: the run to write to; may be None on ranks that do not own the recording.
        fields: names of the fields to record.
        owner: whether this rank writes. Of ranks that hold the same rows (tensor parallel ones) exactly one
            should; on the others every call does nothing, and ``finish`` gives None.
        window_tokens: rows before a request's end that may be overwritten (rejected speculative tokens).
        chunk_bytes: payload of one chunk in the field's largest layer group, at most.
        chunk_rows: rows of one chunk, instead of ``chunk_bytes``.
        requests_max: requests at a time; ``begin`` refuses more.
        inflight_bytes_max: payload handed to the writers and not stored yet; past it calls wait.
        writers: background threads.
        room_wait_s: how long a call waits for room in flight before it gives the request up.
        store_wait_s: how long a write is tried again while the store is full or out of reach.

    Raises:
        NotFound: the run has no such field; names those that it has.
        InvalidInput: a bound that is not positive, or an owner without a run.
    """

    def __init__(
        self,
        run: Run | None,
        fields: Sequence[str],
        *,
        owner: bool = True,
        window_tokens: int = 32,
        chunk_bytes: int = 4 << 20,
        chunk_rows: int | None = None,
        requests_max: int = 256,
        inflight_bytes_max: int = 256 << 20,
        writers: int = 2,
        room_wait_s: float = 60.0,
        store_wait_s: float = 60.0,
    ) -> None:
        _check_bounds(
            window_tokens,
            chunk_bytes=chunk_bytes,
            chunk_rows=1 if chunk_rows is None else chunk_rows,
            requests_max=requests_max,
            inflight_bytes_max=inflight_bytes_max,
            writers=writers,
        )
        if isinstance(fields, str):
            raise InvalidInput(f"recorder: fields: expected a list of names, got {fields!r}")
        self.run = run if owner else None
        self.owner = owner
        self.field_names = tuple(fields)
        self._lock = threading.RLock()
        self._open: dict[int, Request] = {}
        self._free = list(range(requests_max))[::-1]
        self._requests_max = requests_max
        self._windows: dict[str, Windows] = {}
        self._closed = False
        if not owner:
            return
        if run is None:
            raise InvalidInput("recorder: the owner rank needs a run")
        for name in fields:
            field = run.field(name)
            rows = chunk_rows or min(rows_per_chunk(field, chunk_bytes), CHUNK_ROWS_MAX)
            self._windows[name] = Windows(field, requests_max, rows, window_tokens)
        self._room = Room(inflight_bytes_max, room_wait_s)
        self._writers = Writers(run, writers, self._room, store_wait_s)
        self._keeper = Keeper(run, self._wanted)

    @property
    def buffer_bytes(self) -> int:
        """Memory that rows take which are not written yet, once every request's buffer was full."""
        return sum(windows.buffer_bytes for windows in self._windows.values())

    def begin(self, request_id: str) -> Request:
        """A new request.

        Raises:
            Busy: ``requests_max`` are open.
        """
        with self._lock:
            if not self.owner:
                return Request(self, request_id, -1)
            self._check_open("begin")
            if not self._free:
                raise Busy(f"request {request_id!r}: requests_max={self._requests_max} are open")
            request = Request(self, request_id, self._free.pop())
            self._open[request.slot] = request
            return request

    def append(
        self,
        field: str,
        requests: Sequence[Request],
        starts: Sequence[int] | npt.NDArray[np.integer],
        rows: object,
        lengths: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Record rows of a whole scheduler batch: checked and copied at once.

        Args:
            field: one of the recorder's fields.
            requests: distinct open requests.
            starts: position of each request's first row.
            rows: ``[sum(lengths), *field.shape]``, the requests' rows one after another.
            lengths: rows of each request; None: one each, as in a decode step.

        Raises:
            InvalidInput, InvalidField, ValueOutOfRange, RowCountMismatch, Conflict: as
            ``Request.append``; then nothing of the batch was taken.
        """
        count = len(requests)
        first = _integers(field, "starts", starts, count)
        sizes = np.ones(count, np.int64) if lengths is None else _integers(field, "lengths", lengths, count)
        self._append(field, requests, first, rows, sizes)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Return when what left the windows so far is stored (or failed), and freed where nobody wants it.

        Raises:
            DeadlineExceeded: naming the bytes still in flight.
        """
        if self.owner and not self._writers.wait_idle(timeout_s):
            raise DeadlineExceeded(
                f"recorder: {self._room.in_flight_bytes} bytes in flight after {timeout_s:g} s"
            )

    def stats(self) -> RecorderStats:
        """What was written, and how often and how long the scheduler waited."""
        if not self.owner:
            return RecorderStats()
        return RecorderStats(
            chunks=self._writers.chunks,
            bytes=self._writers.bytes,
            waits=self._room.waits,
            waited_s=self._room.waited_s,
            retries=self._writers.retries,
            failed=self._writers.failed,
            in_flight_bytes=self._room.in_flight_bytes,
            requests=len(self._open),
        )

    def close(self, timeout_s: float = 60.0) -> None:
        """Abort what is open, write what is in flight, end the threads. Idempotent.

        Raises:
            DeadlineExceeded: something was still in flight after ``timeout_s``; the store reaps it.
        """
        with self._lock:
            if self._closed or not self.owner:
                return
            self._closed = True
            for request in list(self._open.values()):
                self.abort_one(request)
        self._keeper.stop()
        if not self._writers.close(timeout_s):
            raise DeadlineExceeded(
                f"recorder: {self._room.in_flight_bytes} bytes in flight {timeout_s:g} s after it was closed"
            )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for requests --------------------------------------------------------------------------

    def append_one(self, request: Request, field: str, start: int, rows: object) -> None:
        """As ``Request.append``."""
        self._append(field, [request], _integers(field, "start", [start], 1), rows, None)

    def finish_one(self, request: Request, kept: Kept) -> None:
        """Write the rest and end the request; its promise is kept once everything is stored."""
        with self._lock:
            if not self.owner:
                request.skip()
                return
            request.check_open("finish")
            ranges = self._kept_ranges(request, kept)
            for name, (_, end) in ranges.items():
                windows = self._windows[name]
                for piece in windows.rest(request.slot, end):
                    self._write(request, windows, piece)
            self._let_go(request)
        request.end(ranges)

    def abort_one(self, request: Request) -> None:
        """End the request; what it wrote is freed."""
        with self._lock:
            if not self.owner:
                request.skip()
                return
            if request.state == "open":
                self._let_go(request)
        request.end(None)

    def free(self, names: list[str]) -> None:
        """Chunks that nobody wants."""
        try:
            self._writers.drop(names)
        except Conflict:
            # Closed while a write was stuck: the store reaps what nobody attached.
            return

    # -- inside --------------------------------------------------------------------------------

    def _append(
        self,
        field: str,
        requests: Sequence[Request],
        starts: Positions,
        rows: object,
        lengths: Positions | None,
    ) -> None:
        with self._lock:
            if not self.owner:
                return
            self._check_open("append")
            windows = self._window(field)
            for request in requests:
                request.check_open("append")
            slots = np.fromiter((request.slot for request in requests), np.int64, len(requests))
            narrowed, sizes = narrow(windows.field, rows, starts, lengths)
            names = [request.id for request in requests]
            for piece in windows.append(slots, starts, sizes, narrowed, names):
                self._write(self._open[piece.slot], windows, piece)

    def _write(self, request: Request, windows: Windows, piece: Piece) -> None:
        """Hand a piece to the writers, waiting for room; what goes wrong waits in the request."""
        if request.error is not None:
            return
        assert self.run is not None
        field = windows.field
        part = request.part(field)
        if part.shard is None:
            part.shard = self.run.backend.shard()
        chunk_id = part.ids.next(part.shard)
        written = Written(chunk_id, piece.start)
        request.expect(field, written)
        try:
            self._writers.submit(field, piece, chunk_id, partial(request.settle, written))
        except ArrowTQError as error:
            request.settle(written, None, error)

    def _kept_ranges(self, request: Request, kept: Kept) -> dict[str, tuple[int, int]]:
        """By field the range to keep. Raises before anything has changed."""
        spans = {
            name: span
            for name, windows in self._windows.items()
            if (span := windows.span(request.slot)) is not None
        }
        if isinstance(kept, Mapping):
            unknown = [name for name in kept if name not in spans]
            if unknown:
                raise InvalidInput(f"request {request.id!r}: kept names {unknown}; it recorded {list(spans)}")
        ranges = {}
        for name, (first, end) in spans.items():
            wanted = kept.get(name, end) if isinstance(kept, Mapping) else end if kept is None else kept
            if not 0 <= wanted <= end:
                raise RowCountMismatch(
                    f"request {request.id!r}, field {name!r}: rows end at {end}, kept is {wanted}",
                    end=end,
                    kept=wanted,
                )
            ranges[name] = (first, max(first, wanted))
        return ranges

    def _let_go(self, request: Request) -> None:
        """Its rows are not needed any more."""
        for windows in self._windows.values():
            windows.free(request.slot)
        del self._open[request.slot]
        self._free.append(request.slot)

    def _wanted(self) -> list[str]:
        with self._lock:
            return [name for request in self._open.values() for name in request.chunk_names()]

    def _window(self, field: str) -> Windows:
        found = self._windows.get(field)
        if found is None:
            raise NotFound(f"recorder: field {field!r} is not recorded; {', '.join(self._windows)} are")
        return found

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise Conflict(f"{what}: the recorder was closed")


def _integers(
    field: str, what: str, values: Sequence[int] | npt.NDArray[np.integer], count: int
) -> Positions:
    array = np.asarray(values)
    if array.shape != (count,) or (count and array.dtype.kind not in "iu"):
        raise InvalidInput(
            f"field {field!r}: {what}: expected {count} integers, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def _check_bounds(window_tokens: int, **bounds: int) -> None:
    for name, value in bounds.items():
        if value < 1:
            raise InvalidInput(f"recorder: {name}={value}: expected at least 1")
    if window_tokens < 0:
        raise InvalidInput(f"recorder: window_tokens={window_tokens}: expected at least 0")
