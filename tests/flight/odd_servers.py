"""Servers that misbehave, one way each: ``python -m tests.flight.odd_servers NAME`` prints its port."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as flight

from arrow_tq_schemas.tickets import SpanTicket, parse_ticket, unpack_spans


class Silent(flight.FlightServerBase):
    """Takes calls and never answers, not even to say hello."""

    def list_actions(self, context: object) -> list[tuple[str, str]]:
        time.sleep(60)
        return []


class Polite(flight.FlightServerBase):
    """Says hello; what else it does is up to the classes after it."""

    def list_actions(self, context: object) -> list[tuple[str, str]]:
        return []


class NeverAnswers(Polite):
    """Actions and streams hang once they are open."""

    def do_action(self, context: object, action: flight.Action) -> list[bytes]:
        time.sleep(60)
        return []

    def do_put(self, context: object, descriptor: object, reader: object, writer: object) -> None:
        time.sleep(60)


class NeverAcks(Polite):
    """Reads every chunk to the end of the stream and acks none."""

    def do_put(self, context: object, descriptor: object, reader: object, writer: object) -> None:
        while True:
            try:
                reader.read_chunk()
            except StopIteration:
                return


class ShortAnswer(Polite):
    """One row fewer than asked, and no error."""

    missing = 1

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.FlightDataStream:
        asked = parse_ticket(ticket.ticket)
        assert isinstance(asked, SpanTicket)
        rows = int(unpack_spans(asked.spans)["rows"].sum()) - self.missing
        schema = pa.schema([("x", pa.int64())])

        def batches() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch([pa.array(range(rows), pa.int64())], schema=schema)

        return flight.GeneratorStream(schema, batches())


class LongAnswer(ShortAnswer):
    """One row more than asked."""

    missing = -1


class OtherType(Polite):
    """Text where numbers were asked."""

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.FlightDataStream:
        return flight.RecordBatchStream(pa.table({"x": ["a", "b"]}))


class Babbles(Polite):
    """Answers every action with something that is no reply, and raises an error of nobody's on get."""

    def do_action(self, context: object, action: flight.Action) -> list[bytes]:
        return [b"\x05\x00\x00\x00hello"]

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.FlightDataStream:
        raise RuntimeError("a fault of its own")


class TellsHeaders(Polite):
    """Refuses every action, quoting the authorization header it came with."""

    def __init__(self, location: str) -> None:
        super().__init__(location, middleware={"quote": Quote()})

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        raise flight.FlightServerError(f"unsupported: {context.get_middleware('quote').header}")


class Quote(flight.ServerMiddlewareFactory):
    def start_call(self, info: object, headers: dict[str, list[str]]) -> Quoted:
        return Quoted(headers.get("authorization", [""])[0])


class Quoted(flight.ServerMiddleware):
    def __init__(self, header: str) -> None:
        self.header = header


if __name__ == "__main__":
    server = globals()[sys.argv[1]]("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    sys.stdin.read()
