"""The Flight service: one method a verb, each a few lines around the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pyarrow as pa
import pyarrow.flight as flight

from arrow_tq_schemas.access import EVERYTHING, Grant, need, need_of
from arrow_tq_schemas.cluster import Beat
from arrow_tq_schemas.commands import (
    COMMANDS,
    Claim,
    Command,
    GetPressure,
    OpenRun,
    Reply,
    Stats,
    pack_reply,
    parse_command,
)
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.tickets import (
    CommitStream,
    PutStream,
    SegmentTicket,
    ShardTicket,
    SpanTicket,
    Ticket,
    parse_put,
    parse_ticket,
)
from arrow_tq_server.budgets import Activity, Budgets
from arrow_tq_server.commits import take_commits
from arrow_tq_server.config import ServerConfig
from arrow_tq_server.errors import answering
from arrow_tq_server.gets import Group, padding, span_answer
from arrow_tq_server.guard import NAME, Callers, Guard, NoHandshake, grant_of, permit, shown_stats
from arrow_tq_server.listing import Listing
from arrow_tq_server.metrics import Metrics
from arrow_tq_server.puts import ChunkStream
from arrow_tq_server.segments import Part, segment_answer
from arrow_tq_server.served import ServedEngine
from arrow_tq_server.tls import Tls


class Service(flight.FlightServerBase):  # type: ignore[misc]
    """Arrow Flight in front of an engine. One a process: pyarrow never frees it."""

    def __init__(
        self,
        location: str,
        engine: ServedEngine,
        config: ServerConfig,
        metrics: Metrics,
        activity: Activity,
        advertised_url: str,
        guard: Guard,
        tls: Tls | None,
    ) -> None:
        # The parent starts to serve while it is made: everything a handler needs comes first.
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._activity = activity
        self._budgets = Budgets(config, metrics)
        self._listing = Listing(engine, advertised_url, config.segments_max)
        self._guard = guard
        # Without tokens there is nothing to look at, and each call is spared two turns through Python.
        looking: dict[str, object] = {"auth_handler": NoHandshake(), "middleware": {NAME: Callers(guard)}}
        super().__init__(
            location,
            **({} if guard.is_open else looking),
            **({} if tls is None else tls.flight_arguments()),
        )

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[flight.Result]:
        """One command, one result."""
        with answering(action.type, self._metrics):
            grant = self._grant(context)
            command = parse_command(action.type, action.body.to_pybytes())
            self._permit(command, grant)
            waits = isinstance(command, Claim | Beat) and command.wait_s > 0
            budget = self._budgets.waiting_claims if waits else self._budgets.actions
            held = self._activity.waiting() if waits else self._activity.work()
            with held, budget.place(), self._metrics.action_s.labels(command.verb).time():
                answer = pack_reply(self._execute(context, command, grant))
            if len(answer) > self._config.message_bytes_max:
                raise InvalidInput(
                    f"{command.verb}: a reply of {len(answer)} bytes, message_bytes_max is "
                    f"{self._config.message_bytes_max}: ask for less at a time"
                )
            return [flight.Result(pa.py_buffer(answer))]

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        """Every command by its verb."""
        with answering("list_actions", self._metrics):
            self._grant(context)
            return [(verb, (kind.__doc__ or verb).strip().splitlines()[0]) for verb, kind in COMMANDS.items()]

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """A stream of one field's chunks, or of step commits."""
        with answering("put", self._metrics):
            grant = self._grant(context)
            asked = parse_put(descriptor.command or b"")
            if isinstance(asked, PutStream):
                permit(self._engine, grant, need(["write"], asked.run), "put")
            with self._budgets.put_streams.place():
                if isinstance(asked, CommitStream):
                    take_commits(self._engine, self._metrics, self._activity, grant, reader, writer)
                    return
                stream = ChunkStream(
                    *(self._engine, self._config, self._metrics, self._activity), asked, reader, writer
                )
                stream.run()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """The rows of a ticket.

        A ``GeneratorStream``: it is as fast as a ``RecordBatchStream`` at messages of this size, and alone
        carries an error's details when one comes up in mid-stream.
        """
        with answering("get", self._metrics):
            grant = self._grant(context)
            asked = parse_ticket(ticket.ticket)
            run = asked.segments.run if isinstance(asked, ShardTicket) else asked.run
            permit(
                self._engine, grant, need(["read"], *([] if run is None else [run])), f"get of {asked.kind}"
            )
            schema, groups = self._answer(asked)
            return flight.GeneratorStream(schema, self._guarded(groups))

    def get_flight_info(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """Where and how to read some segments' rows of a field."""
        with answering("get_flight_info", self._metrics), self._describing():
            return self._listing.info(descriptor, self._grant(context))

    def get_schema(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.SchemaResult:
        """What such rows look like."""
        with answering("get_schema", self._metrics), self._describing():
            return flight.SchemaResult(self._listing.schema(descriptor, self._grant(context)))

    def list_flights(self, context: flight.ServerCallContext, criteria: bytes) -> list[flight.FlightInfo]:
        """Runs and their finalized segments."""
        with answering("list_flights", self._metrics), self._describing():
            return list(self._listing.flights(criteria, self._grant(context)))

    def _grant(self, context: flight.ServerCallContext) -> Grant:
        """What the caller may do; raises ``Unauthenticated``."""
        return EVERYTHING if self._guard.is_open else grant_of(context)

    def _permit(self, command: Command, grant: Grant) -> None:
        if isinstance(command, OpenRun) and command.fields is not None:
            # The one command whose run need not exist.
            grant.check(need_of(command), command.verb)
        else:
            permit(self._engine, grant, need_of(command), command.verb)

    def _execute(self, context: flight.ServerCallContext, command: Command, grant: Grant) -> Reply:
        """The reply, with what a token of some runs must not see left out."""
        if grant.runs is not None and isinstance(command, GetPressure):
            return Reply(body=self._engine.pressure_of(grant.runs))
        if isinstance(command, Claim):
            # A claim that waits takes nothing for a client that is gone.
            return self._engine.claim(command, context.is_cancelled)
        reply = self._engine.execute(command)
        if isinstance(reply.body, Stats):
            return Reply(body=Stats(values=shown_stats(reply.body.values, grant)))
        return reply

    def _answer(self, ticket: Ticket) -> tuple[pa.Schema, Iterator[Group]]:
        if isinstance(ticket, SpanTicket):
            return span_answer(self._engine, ticket, self._config.get_message_bytes)
        if isinstance(ticket, SegmentTicket | ShardTicket):
            part = Part(ticket.shard, ticket.fills) if isinstance(ticket, ShardTicket) else None
            asked = ticket.segments if isinstance(ticket, ShardTicket) else ticket
            if len(asked.segment_ids) > self._config.segments_max:
                limit = self._config.segments_max
                raise InvalidInput(f"ticket of {len(asked.segment_ids)} segments: segments_max is {limit}")
            schema, batches = segment_answer(self._engine, asked, self._config.get_message_bytes, part)
            return schema, ([batch] for batch in batches)
        with self._activity.work(), self._budgets.actions.place():
            table = self._engine.query(ticket.query, ticket.run)
        row_bytes = table.nbytes // max(table.num_rows, 1) + 1
        rows_a_message = max(self._config.get_message_bytes // row_bytes, 1)
        return table.schema, ([batch] for batch in table.to_batches(rows_a_message))

    def _guarded(self, groups: Iterator[Group]) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
        """Hold a place from the first message to the last; a client that leaves closes the generator."""
        began = time.perf_counter()
        with answering("get", self._metrics), self._activity.work(), self._budgets.gets.place():
            for group in groups:
                sizes = [batch.get_total_buffer_size() for batch in group]
                self._metrics.get_bytes.inc(sum(sizes))
                for message in [(batch, padding(size)) for batch, size in zip(group, sizes, strict=True)]:
                    # The process may have been stopped since it was made, or since the one before left.
                    self._engine.check_serving()
                    yield message
                del message
            self._metrics.get_s.observe(time.perf_counter() - began)

    def _describing(self) -> AbstractContextManager[None]:
        return self._budgets.actions.place()
