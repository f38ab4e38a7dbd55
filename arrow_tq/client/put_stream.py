"""One long-lived put stream: a thread that writes chunks and a thread that reads acks.

Writing and reading in one thread can deadlock both ends once both directions are full. The stream's
gRPC deadline bounds either thread, so neither can hang for longer than that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.flight as flight
from pydantic import ValidationError

from arrow_tq.client.connection import Connection
from arrow_tq.client.failures import FLIGHT_FAILURES, translate
from arrow_tq.client.pending import Item
from arrow_tq_schemas.errors import ArrowTQError, InternalError, Unreachable, from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import PutAck, PutMessage, PutStream

OnSettled = Callable[[Item, ArrowTQError | None], None]
OnLeft = Callable[[Sequence[Item], ArrowTQError | None], None]


class ChunkSender:
    """Sends chunks of one (run, field, layer group), in order, until it is idle, old or broken."""

    def __init__(
        self,
        connection: Connection,
        stream: PutStream,
        field: Field,
        on_settled: OnSettled,
        on_left: OnLeft,
    ) -> None:
        """``on_left`` gets what was not acked when the stream ended, and the error if it broke."""
        self._connection = connection
        self._options = connection.options
        self._stream = stream
        self._schema = field.arrow_schema(stream.group)
        self._on_settled = on_settled
        self._on_left = on_left
        self._what = f"put of {stream.field!r}"
        self._deadline_s = 2 * self._options.stream_life_s
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._sent: deque[Item] = deque()
        self._acked = 0
        self._unasked_bytes = 0
        self._backlog_bytes = 0
        self._ending = False
        self._error: ArrowTQError | None = None
        self._thread = threading.Thread(target=self._run, name=f"arrow-tq-put-{stream.field}", daemon=True)
        self._thread.start()

    def send(self, item: Item) -> bool:
        """Queue a chunk; False where this stream takes no more and another is needed."""
        with self._changed:
            if self._ending:
                return False
            self._queue.append(item)
            self._backlog_bytes += item.nbytes
            self._changed.notify_all()
            return True

    @property
    def backlog_bytes(self) -> int:
        """Payload handed over and not acked yet."""
        return self._backlog_bytes

    def finish(self) -> None:
        """Take no more; what is queued is still sent."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the stream to end."""
        self._thread.join(max(timeout_s, 0.0))

    # -- the writing thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._send_all()
        except ArrowTQError as error:
            self._fail(error)
        except Exception as error:
            self._fail(InternalError(f"{self._what}: {type(error).__name__}: {error}"))
        with self._changed:
            self._ending = True
            left, reason = [*self._sent, *self._queue], self._error
            self._sent.clear()
            self._queue.clear()
        if left:
            self._on_left(left, reason)

    def _send_all(self) -> None:
        until = time.monotonic() + self._options.stream_life_s
        item = self._next(until)
        if item is None:
            return
        descriptor = self._stream.model_dump_json().encode()
        writer, reader = self._connection.put(descriptor, self._schema, self._deadline_s, self._what)
        acks = threading.Thread(target=self._read_acks, args=(reader,), name="arrow-tq-acks", daemon=True)
        acks.start()
        try:
            while item is not None:
                self._write(writer, item)
                item = self._next(until)
            writer.done_writing()
        except FLIGHT_FAILURES as error:
            self._fail(translate(error, self._connection.url, self._what, self._deadline_s))
        acks.join()
        self._close(writer)

    def _next(self, until: float) -> Item | None:
        """The next chunk, already noted as sent; None when the stream should end."""
        with self._changed:
            idle_until = min(time.monotonic() + self._options.stream_idle_s, until)
            while not self._queue:
                left = idle_until - time.monotonic()
                # An ending stream still waits for its acks, in the reading thread.
                if self._ending or self._error is not None or (left <= 0 and not self._sent):
                    self._ending = True
                    return None
                self._changed.wait(max(left, 0.05))
            if self._error is not None or time.monotonic() >= until:
                self._ending = True
                return None
            item = self._queue.popleft()
            self._sent.append(item)
            return item

    def _write(self, writer: flight.FlightStreamWriter, item: Item) -> None:
        header = item.chunk.header
        self._unasked_bytes += item.nbytes
        with self._changed:
            last = not self._queue
        ask = last or self._unasked_bytes >= self._options.ack_window_bytes
        if ask:
            self._unasked_bytes = 0
        message = PutMessage(header=header.to_bytes().decode(), ack=ask).model_dump_json().encode()
        writer.write_with_metadata(item.chunk.to_batch(item.field), pa.py_buffer(message))

    def _close(self, writer: flight.FlightStreamWriter) -> None:
        """The stream's status, which comes out here alone, replaces what either thread made of its end."""
        try:
            writer.close()
        except FLIGHT_FAILURES as error:
            failure = translate(error, self._connection.url, self._what, self._deadline_s)
            with self._changed:
                self._error = failure
        with self._changed:
            if self._error is None and self._sent:
                self._error = Unreachable(f"{self._what}: {self._connection.url} ended the stream unacked")

    # -- the reading thread --------------------------------------------------------------------

    def _read_acks(self, reader: flight.FlightMetadataReader) -> None:
        try:
            while (raw := reader.read()) is not None:
                self._settle(PutAck.model_validate_json(raw.to_pybytes()))
        except FLIGHT_FAILURES as error:
            self._fail(translate(error, self._connection.url, self._what, self._deadline_s))
        except ValidationError as error:
            self._fail(InternalError(f"{self._what}: an ack that is none: {error.error_count()} errors"))
        with self._changed:
            # Without acks nothing more can be sent here, whoever ended it.
            self._ending = True
            self._changed.notify_all()

    def _settle(self, ack: PutAck) -> None:
        with self._changed:
            done = [self._sent.popleft() for _ in range(min(ack.stored - self._acked, len(self._sent)))]
            self._acked = ack.stored
            self._backlog_bytes -= sum(item.nbytes for item in done)
            self._changed.notify_all()
        for item in done:
            wire = ack.errors.get(item.chunk.header.id)
            self._on_settled(item, None if wire is None else from_wire(wire))

    def _fail(self, error: ArrowTQError) -> None:
        """Remember why the stream broke."""
        with self._changed:
            self._error = self._error or error
            self._ending = True
            self._changed.notify_all()
