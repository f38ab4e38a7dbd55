"""One long-lived put stream: a thread that writes chunks and a thread that reads acks.

Writing and reading in one thread can deadlock both ends once both directions are full. The stream's
gRPC deadline bounds either thread, so neither can hang for longer than that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
from pydantic import ValidationError

from arrow_tq.client.connection import Connection
from arrow_tq.client.failures import FLIGHT_FAILURES, translate
from arrow_tq.client.pending import Company, Item
from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.errors import ArrowTQError, InternalError, Unreachable, from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import CHUNKS_PER_BATCH_MAX, PutAck, PutMessage, PutStream

LINGER_S = 0.005
"""How long small chunks that nobody waits for wait for others to share a message with."""
COMPANY_MIN = 64
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
        self._company = Company(COMPANY_MIN, int(self._options.coalesce_bytes), LINGER_S)
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
            if self._company.add(item.nbytes):
                self._changed.notify_all()
            return True

    def hurry(self) -> None:
        """Somebody waits for what was handed over."""
        with self._changed:
            if self._company.hurry():
                self._changed.notify_all()

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
        items = self._next(until)
        if not items:
            return
        descriptor = self._stream.model_dump_json().encode()
        writer, reader = self._connection.put(descriptor, self._schema, self._deadline_s, self._what)
        acks = threading.Thread(target=self._read_acks, args=(reader,), name="arrow-tq-acks", daemon=True)
        acks.start()
        try:
            while items:
                self._write(writer, items)
                items = self._next(until)
            writer.done_writing()
        except FLIGHT_FAILURES as error:
            self._fail(translate(error, self._connection.url, self._what, self._deadline_s))
        acks.join()
        self._close(writer)

    def _next(self, until: float) -> list[Item]:
        """The next chunks, already noted as sent: one, or small ones that share a message. None left: end."""
        with self._changed:
            idle_until = min(time.monotonic() + self._options.stream_idle_s, until)
            while not self._queue:
                left = idle_until - time.monotonic()
                # An ending stream still waits for its acks, in the reading thread.
                if self._ending or self._error is not None or (left <= 0 and not self._sent):
                    self._ending = True
                    return []
                self._changed.wait(max(left, 0.05))
            while not self._ending and (left := self._company.wait_s) > 0:
                self._changed.wait(left)
            if self._error is not None or time.monotonic() >= until:
                self._ending = True
                return []
            items = [self._queue.popleft()]
            size = items[0].nbytes
            while self._queue and len(items) < CHUNKS_PER_BATCH_MAX:
                size += self._queue[0].nbytes
                if size > self._options.coalesce_bytes:
                    break
                items.append(self._queue.popleft())
            for item in items:
                self._company.take(item.nbytes)
            self._sent.extend(items)
            return items

    def _write(self, writer: flight.FlightStreamWriter, items: Sequence[Item]) -> None:
        header, *more = [item.chunk.header.to_bytes().decode() for item in items]
        self._unasked_bytes += sum(item.nbytes for item in items)
        with self._changed:
            last = not self._queue
        ask = last or self._unasked_bytes >= self._options.ack_window_bytes
        if ask:
            self._unasked_bytes = 0
        message = PutMessage(header=header, ack=ask, more=more).model_dump_json(exclude_defaults=True)
        writer.write_with_metadata(self._batch(items), pa.py_buffer(message.encode()))

    def _batch(self, items: Sequence[Item]) -> pa.RecordBatch:
        """One chunk as it is; several small ones copied together."""
        chunks = [item.chunk for item in items]
        if len(chunks) == 1:
            return chunks[0].to_batch(items[0].field)
        valid = None
        if any(chunk.valid is not None for chunk in chunks):
            valid = np.concatenate(
                [np.ones(len(one.values), np.bool_) if one.valid is None else one.valid for one in chunks]
            )
        values = np.concatenate([chunk.values for chunk in chunks])
        column = to_array(values, valid, self._schema.field(0).type)
        return pa.RecordBatch.from_arrays([column], schema=self._schema)

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
