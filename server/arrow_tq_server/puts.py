"""DoPut: streams of chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.flight as flight
import structlog
from pydantic import BaseModel, ValidationError

from arrow_tq_schemas.chunks import ChunkHeader, explain, header_form
from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage
from arrow_tq_schemas.tickets import PutAck, PutMessage, PutStream
from arrow_tq_server.budgets import Activity
from arrow_tq_server.config import ServerConfig
from arrow_tq_server.errors import bounded_wire, unforeseen
from arrow_tq_server.metrics import Metrics
from arrow_tq_server.served import ServedEngine

Model = TypeVar("Model", bound=BaseModel)


class ChunkStream:
    """Takes the chunks of one put stream. A refused chunk is reported, and the stream goes on.

    What cannot even be told which chunk it is (bad framing, metadata or schema) ends the stream; the
    chunks before it are stored and acked.
    """

    def __init__(
        self,
        engine: ServedEngine,
        config: ServerConfig,
        metrics: Metrics,
        activity: Activity,
        stream: PutStream,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._activity = activity
        self._stream = stream
        self._reader = reader
        self._writer = writer
        self._dealt = 0
        self._batches = 0
        self._bytes = 0
        self._errors: dict[str, dict[str, object]] = {}

    def run(self) -> None:
        """Until the client ends the stream."""
        self._check_schema()
        try:
            while (message := next_message(self._reader)) is not None:
                with self._activity.work():
                    self._take(message)
        finally:
            self._ack()

    def _check_schema(self) -> None:
        stream = self._stream
        field = self._engine.field(stream.run, stream.field)
        if stream.group >= len(field.groups):
            raise MalformedMessage(
                f"put stream of {stream.field!r}: layer group {stream.group}, it has {len(field.groups)}"
            )
        expected = field.arrow_schema(stream.group)
        try:
            schema = self._reader.schema
        except pa.ArrowException as error:
            raise malformed("put stream: schema", error) from None
        if not schema.equals(expected, check_metadata=True):
            raise MalformedMessage(
                f"put stream of {stream.field!r}: schema {one_line(schema)}, expected {one_line(expected)}"
            )

    def _take(self, message: flight.FlightStreamChunk) -> None:
        put, headers = self._identify(message)
        batch = message.data
        size = batch.get_total_buffer_size()
        self._metrics.in_flight_bytes.inc(size)
        self._bytes += size
        self._batches += 1
        self._dealt += len(headers)
        try:
            self._refuse_unseen(headers[0], batch, size)
            self._store(headers, batch)
        except ArrowTQError as error:
            self._refuse(headers, error)
        except Exception as error:
            # One chunk's fault must not end the stream that others share.
            self._refuse(headers, unforeseen("put", error))
        config = self._config
        if put.ack or self._batches >= config.put_ack_batches or self._bytes >= config.put_ack_bytes:
            self._ack()

    def _identify(self, message: flight.FlightStreamChunk) -> tuple[PutMessage, list[ChunkHeader]]:
        if message.data is None or message.app_metadata is None:
            raise MalformedMessage("put stream: expected batches with a PutMessage as app_metadata")
        put = parse(PutMessage, message.app_metadata.to_pybytes(), "put message")
        first = ChunkHeader.from_bytes(put.header.encode())
        form = header_form(first.run, first.epoch, first.field)
        texts = [text.encode() for text in put.more]
        return put, [first, *(form.read(raw) or ChunkHeader.from_bytes(raw) for raw in texts)]

    def _store(self, headers: Sequence[ChunkHeader], batch: pa.RecordBatch) -> None:
        began = time.perf_counter()
        row_bytes, stored_rows = batch.nbytes / max(batch.num_rows, 1), 0
        outcomes = self._engine.receive(self._stream, headers, batch)
        for header, error in zip(headers, outcomes, strict=True):
            if error is None:
                stored_rows += header.rows
            else:
                self._refuse([header], error)
        self._metrics.put_bytes.inc(row_bytes * stored_rows)
        self._metrics.put_s.observe(time.perf_counter() - began)

    def _refuse_unseen(self, header: ChunkHeader, batch: pa.RecordBatch, size: int) -> None:
        """What has to be refused before any value is looked at."""
        if size > self._config.message_bytes_max:
            raise MalformedMessage(
                f"chunk {header.id}: a message of {size} bytes, message_bytes_max is "
                f"{self._config.message_bytes_max}"
            )
        for buffer in batch.column(0).buffers():
            # Plain buffers are slices of the message; decompressed ones have memory of their own.
            if buffer is not None and buffer.size and buffer.parent is None:
                raise MalformedMessage(f"chunk {header.id}: compressed bodies are not taken")

    def _refuse(self, headers: Sequence[ChunkHeader], error: ArrowTQError) -> None:
        for header in headers:
            self._metrics.errors.labels(error.code).inc()
            self._errors[header.id] = bounded_wire(error)

    def _ack(self) -> None:
        if not self._batches:
            return
        began = time.perf_counter()
        size, self._bytes, self._batches = self._bytes, 0, 0
        try:
            self._engine.sync(self._stream.run)
        finally:
            self._metrics.in_flight_bytes.dec(size)
        ack = PutAck(stored=self._dealt, errors=self._errors)
        self._errors = {}
        answer(self._writer, ack)
        self._metrics.ack_s.observe(time.perf_counter() - began)


def answer(writer: flight.FlightMetadataWriter, message: BaseModel) -> None:
    """Send a message back. A client that is gone asks again elsewhere: nobody is left to be told."""
    try:
        writer.write(pa.py_buffer(message.model_dump_json().encode()))
    except (pa.ArrowException, OSError) as error:
        structlog.get_logger("arrow_tq.server").debug("answer not taken", error=str(error).partition("\n")[0])


def next_message(reader: flight.MetadataRecordBatchReader) -> flight.FlightStreamChunk | None:
    """The next message, or None at the end: a client that died looks like one that finished.

    Raises:
        MalformedMessage: bytes that are no Arrow message.
    """
    try:
        return reader.read_chunk()
    except StopIteration:
        return None
    except (pa.ArrowException, OSError) as error:
        raise malformed("put stream", error) from None


def parse(kind: type[Model], raw: bytes, what: str) -> Model:
    """A JSON message; raises ``MalformedMessage`` naming key and value."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise MalformedMessage(f"{what}: {explain(error)}") from None


def malformed(what: str, error: Exception) -> MalformedMessage:
    """Arrow's refusal of bytes from the network, as ours: its first line only."""
    text = str(error).splitlines() or [type(error).__name__]
    return MalformedMessage(f"{what}: {text[0][:300]}")


def one_line(schema: pa.Schema) -> str:
    """A schema for an error message: names, types and metadata."""
    return ", ".join(f"{one.name}: {one.type} {one.metadata or ''}".rstrip() for one in schema)[:400]
