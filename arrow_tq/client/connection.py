"""One process's connection to a server: calls with deadlines, typed failures, one retry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from arrow_tq.client.failures import FLIGHT_FAILURES, translate
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.tls import Tls
from arrow_tq_schemas.errors import ArrowTQError, Conflict, DeadlineExceeded, InvalidInput, Unreachable

MESSAGE_BYTES_MAX = (1 << 30) + (16 << 20)
"""The largest message a server can be set to send, and room for its framing."""
RECONNECT_MS = (100, 2000)
"""First and largest pause between gRPC's own attempts to connect; its defaults go up to two minutes."""
Answer = TypeVar("Answer")


class Connection:
    """Calls to one server. Thread-safe; the first call connects."""

    def __init__(self, url: str, token: str | None, options: ClientOptions, tls: Tls | None = None) -> None:
        self.url = url
        self._tls = tls
        self.options = options
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._client: flight.FlightClient | None = None
        self._connecting = threading.Lock()

    def action(self, verb: str, body: bytes, deadline_s: float) -> bytes:
        """Body of the one result of an action."""

        def call(client: flight.FlightClient) -> bytes:
            results = list(client.do_action(flight.Action(verb, body), self._call(deadline_s)))
            if len(results) != 1:
                raise ConnectionResetError(f"connection reset: {len(results)} results, expected 1")
            raw: bytes = results[0].body.to_pybytes()
            return raw

        return self.attempt(call, verb, deadline_s)

    def get(self, ticket: bytes, deadline_s: float, what: str) -> flight.FlightStreamReader:
        """The stream of a ticket; what reading from it raises is the reader's to translate."""

        def call(client: flight.FlightClient) -> flight.FlightStreamReader:
            return client.do_get(flight.Ticket(ticket), self._call(deadline_s))

        return self.attempt(call, what, deadline_s)

    def info(self, query: bytes, deadline_s: float) -> flight.FlightInfo:
        """What a ``FlightQuery`` names, and where it is read."""
        command = flight.FlightDescriptor.for_command(query)
        return self.attempt(
            lambda client: client.get_flight_info(command, self._call(deadline_s)), "flight info", deadline_s
        )

    def put(
        self, descriptor: bytes, schema: pa.Schema, deadline_s: float, what: str
    ) -> tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]:
        """A new put stream, which ends at its deadline whatever happens."""

        def call(
            client: flight.FlightClient,
        ) -> tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]:
            command = flight.FlightDescriptor.for_command(descriptor)
            writer, reader = client.do_put(command, schema, self._call(deadline_s))
            return writer, reader

        return self.attempt(call, what, deadline_s)

    def attempt(self, call: Callable[[flight.FlightClient], Answer], what: str, deadline_s: float) -> Answer:
        """One call on the current client; failures come out as ours."""
        client = self._connected()
        try:
            return call(client)
        except FLIGHT_FAILURES as error:
            failure = translate(error, self.url, what, deadline_s)
        try:
            raise failure from None
        finally:
            # An error and a frame that names it are a cycle: it would keep the connection from ending.
            del failure, client

    def retrying(self, call: Callable[[], Answer]) -> Answer:
        """A call that may be repeated: once more, on a new connection, where it did not get through."""
        try:
            return call()
        except Unreachable:
            time.sleep(self.options.retry_pause_s)
            self.renew()
        return call()

    def batches(
        self, reader: flight.FlightStreamReader, what: str, deadline_s: float
    ) -> Iterator[pa.RecordBatch]:
        """The batches of a stream; the stream is cancelled when nobody wants the rest."""
        ended = False
        try:
            while True:
                try:
                    batch = reader.read_chunk().data
                except StopIteration:
                    ended = True
                    return
                except FLIGHT_FAILURES as error:
                    ended = True
                    failure = translate(error, self.url, what, deadline_s)
                    break
                if batch is not None:
                    yield batch
                # Not held while the next one comes: its memory is then the next one's, and warm.
                del batch
        finally:
            if not ended:
                reader.cancel()
            del reader
        try:
            raise failure from None
        finally:
            del failure

    def schema(self, reader: flight.FlightStreamReader, what: str, deadline_s: float) -> pa.Schema:
        """The schema of a stream, which is the first that a server says."""
        return self.attempt(lambda _: reader.schema, what, deadline_s)

    def ensure(self) -> None:
        """Connect now; raises ``Unreachable``."""
        self._connected()

    def renew(self) -> None:
        """Let the next call connect anew: a broken channel would first sit out its pauses.

        Calls of other threads under way end by themselves.
        """
        self._client = None

    def _call(self, deadline_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=deadline_s, headers=self._headers)

    def _connected(self) -> flight.FlightClient:
        client = self._client
        if client is not None:
            return client
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> flight.FlightClient:
        """Connect and hear one answer, in a thread: gRPC's own deadlines do not work in every fork."""
        outcome: list[flight.FlightClient | ArrowTQError] = []
        limit_s = self.options.connect_s
        attempt = threading.Thread(
            target=self._try_connect, args=(outcome,), name="arrow-tq-connect", daemon=True
        )
        attempt.start()
        attempt.join(limit_s + 1.0)
        if not outcome:
            raise Conflict(
                f"connect to {self.url}: gRPC does not run in this process, which was forked while calls "
                "to a store were under way; start such processes with spawn",
                url=self.url,
            )
        if isinstance(outcome[0], ArrowTQError):
            raise outcome[0]
        return outcome[0]

    def _try_connect(self, outcome: list[flight.FlightClient | ArrowTQError]) -> None:
        limit_s = self.options.connect_s
        failure: ArrowTQError
        try:
            tls = {} if self._tls is None else self._tls.flight_arguments()
            client = flight.FlightClient(self.url, generic_options=self._channel_options(), **tls)
            list(client.list_actions(self._call(limit_s)))
            outcome.append(client)
            return
        except InvalidInput as error:
            failure = error
        except FLIGHT_FAILURES as error:
            failure = translate(error, self.url, "connect", limit_s)
        if isinstance(failure, DeadlineExceeded):
            failure = Unreachable(f"connect: {self.url} did not answer within {limit_s:g} s", url=self.url)
        outcome.append(failure)

    def _channel_options(self) -> list[tuple[str, int]]:
        keepalive_ms = int(self.options.keepalive_s * 1000)
        return [
            # A connection of our own: its breaking and mending is nobody else's.
            ("grpc.use_local_subchannel_pool", 1),
            # Large frames: 1.3 to 1.4 times the throughput on loopback.
            ("grpc.http2.max_frame_size", 16_777_215),
            # A fixed window: with one that grows, the allocator gives memory back and touches it anew.
            ("grpc.http2.lookahead_bytes", int(self.options.get_window_bytes)),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
            # No pause, for all its name: how long one attempt may take. A busy server greets late.
            ("grpc.min_reconnect_backoff_ms", int(self.options.connect_s * 1000)),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
        ]
