"""The wire by hand: what a client of another make would send, right or wrong."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

from arrow_tq_schemas.chunks import Chunk, ChunkHeader, checksum
from arrow_tq_schemas.errors import ArrowTQError, error_types, from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import IdFactory
from arrow_tq_schemas.spans import Span, Spans, to_spans
from arrow_tq_schemas.tickets import PutAck, PutMessage, PutStream, SegmentTicket, SpanTicket, pack_spans

IDS = IdFactory()
CALL = flight.FlightCallOptions(timeout=20)


def make_chunk(
    field: Field,
    run: str,
    values: npt.NDArray[np.generic],
    start: int = 0,
    group: int = 0,
    valid: npt.NDArray[np.bool_] | None = None,
    epoch: int = 0,
    shard: int = 0,
) -> Chunk:
    """A chunk with the right header."""
    chunk_id = IDS.next(shard).sibling(group)
    header = ChunkHeader(
        id=chunk_id.hex,
        run=run,
        epoch=epoch,
        field=field.name,
        start=start,
        rows=len(values),
        checksum=checksum(chunk_id, run, epoch, field.name, start, values, valid),
    )
    return Chunk(header, values, valid)


def message_of(header: ChunkHeader, ack: bool = True) -> bytes:
    return PutMessage(header=header.to_bytes().decode(), ack=ack).model_dump_json().encode()


def open_put(
    client: flight.FlightClient, stream: PutStream, schema: pa.Schema, **write_options: object
) -> tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]:
    options = flight.FlightCallOptions(timeout=20, write_options=pa.ipc.IpcWriteOptions(**write_options))
    descriptor = flight.FlightDescriptor.for_command(stream.model_dump_json().encode())
    writer, reader = client.do_put(descriptor, schema, options)
    return writer, reader


def put(
    client: flight.FlightClient,
    stream: PutStream,
    schema: pa.Schema,
    messages: Sequence[tuple[pa.RecordBatch, bytes]],
    **write_options: object,
) -> list[PutAck]:
    """Send messages, end the stream, and return the acks; raises what the server answered instead."""
    writer, reader = open_put(client, stream, schema, **write_options)
    for batch, metadata in messages:
        try:
            writer.write_with_metadata(batch, pa.py_buffer(metadata))
        except flight.FlightError:
            # The stream ended already: why comes out at its end.
            break
    return [PutAck.model_validate_json(raw) for raw in end(writer, reader)]


def end(writer: flight.FlightStreamWriter, reader: flight.FlightMetadataReader) -> list[bytes]:
    """End a put stream: the answers still to come. Raises the error that it ended with."""
    answers = []
    try:
        writer.done_writing()
        while (raw := reader.read()) is not None:
            answers.append(raw.to_pybytes())
        writer.close()
    except (pa.ArrowException, flight.FlightError) as error:
        raise told(error) from None
    return answers


def told(error: BaseException) -> ArrowTQError:
    """The error that a server sent: its details, or its text where Flight keeps no more."""
    assert "Traceback" not in str(error)
    assert ".py" not in str(error)
    extra = getattr(error, "extra_info", None)
    if extra:
        return from_wire(json.loads(extra))
    code, _, message = str(error).removeprefix("Unknown error: ").partition(": ")
    assert code in error_types(), f"an error of nobody's: {type(error).__name__}: {error}"
    return from_wire({"code": code, "message": message})


def with_length(batch: pa.RecordBatch, rows: int) -> pa.RecordBatch:
    """The same batch with a column that claims ``rows`` rows: Arrow's own constructors would refuse it."""
    exported = (ctypes.c_int64 * 10)()  # struct ArrowArray: [0] is the length, [6] the children
    batch._export_to_c(ctypes.addressof(exported))
    (column,) = ctypes.cast(exported[6], ctypes.POINTER(ctypes.c_int64 * 1)).contents
    ctypes.cast(column, ctypes.POINTER(ctypes.c_int64)).contents.value = rows
    exported[0] = rows
    return pa.RecordBatch._import_from_c(ctypes.addressof(exported), batch.schema)


def refusals(acks: Sequence[PutAck]) -> dict[str, ArrowTQError]:
    return {name: from_wire(wire) for ack in acks for name, wire in ack.errors.items()}


def span_ticket(
    field: Field, run: str, spans: Spans | Sequence[Span], group: int = 0, layers: list[int] | None = None
) -> SpanTicket:
    packed = spans if isinstance(spans, np.ndarray) else to_spans(spans)
    return SpanTicket(run=run, field=field.name, group=group, layers=layers, spans=pack_spans(packed))


def segment_ticket(field: Field, run: str, ids: Sequence[str], **more: object) -> SegmentTicket:
    return SegmentTicket(run=run, field=field.name, segment_ids=list(ids), **more)


def get(client: flight.FlightClient, ticket: SpanTicket | SegmentTicket | bytes) -> list[pa.RecordBatch]:
    raw = ticket if isinstance(ticket, bytes) else ticket.model_dump_json().encode()
    try:
        return [chunk.data for chunk in client.do_get(flight.Ticket(raw), CALL)]
    except (pa.ArrowException, flight.FlightError) as error:
        raise told(error) from None
