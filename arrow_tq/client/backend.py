"""``FlightBackend``: a store behind an Arrow Flight server."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from arrow_tq.backend import Placer, PutHandle, Read, Rows, copying_threads
from arrow_tq.client.address import check_token, check_url
from arrow_tq.client.bundles import FlightBundleWriter, Staging
from arrow_tq.client.cluster import OWN_NUMBER, Cluster
from arrow_tq.client.commits import Commits
from arrow_tq.client.connection import Connection
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.riding import RidingPut, wait_for_others
from arrow_tq.client.shard_client import ShardClient
from arrow_tq.client.shard_reads import read_shards, shard_numbers
from arrow_tq.client.tls import Tls
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.cluster import ClusterMap, GetCluster
from arrow_tq_schemas.commands import (
    Claim,
    ClaimInfo,
    CloseBundle,
    Command,
    Empty,
    FinalizeSession,
    GetStats,
    OpenSession,
    Reply,
    RunInfo,
    RunQuery,
    Stats,
    StepCommit,
    StepResult,
    unpack_reply,
)
from arrow_tq_schemas.errors import ArrowTQError, ChunkLost, Conflict, InvalidInput, Unavailable, Unreachable
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import SqlTicket

Answer = TypeVar("Answer")
CLOSE_S = 10.0
"""How long ``close`` waits for puts and commits under way."""
EXIT_S = 2.0
"""The same where a store was never closed and the interpreter ends."""
FORK_SETTLE_S = 0.02
"""gRPC still holds a lock for a moment when its last thread is gone, and a child would inherit it held."""
GRPC_THREAD = "grpc_global_tim"
"""A thread that lives as long as gRPC does in a process, as the kernel cuts its name."""


class Link:
    """What one process has open to the server."""

    def __init__(self, url: str, token: str | None, options: ClientOptions, tls: Tls | None) -> None:
        self.connection = Connection(url, token, options, tls)
        self.commits = Commits(self.connection)
        self.main = ShardClient(OWN_NUMBER, 0, self.connection, near=True)
        self.writes = self.main.writes
        self.commits.carry(self.writes.adopter)
        self.writes.adopter.ride(self.commits.leave)
        self.staging = Staging(options.bundle_staging_bytes_max)

        def connect(shard_url: str) -> Connection:
            return Connection(shard_url, token, options, tls if shard_url.startswith("grpc+tls:") else None)

        self.cluster = Cluster(self._ask_map, connect, self.main)

    def _ask_map(self, deadline_s: float) -> ClusterMap:
        command = GetCluster()
        raw = self.connection.action(command.verb, command.model_dump_json().encode(), deadline_s)
        body = unpack_reply(command, raw).body
        assert isinstance(body, ClusterMap)
        return body

    def close(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        self.cluster.close(timeout_s)
        # What was written in place is adopted on the commit stream.
        self.main.writes.close(max(until - time.monotonic(), 0.0))
        self.commits.close(until - time.monotonic())
        self.main.close(max(until - time.monotonic(), 0.0))


class FlightBackend:
    """Implements ``Backend`` over Arrow Flight. Thread-safe; a forked child connects anew.

    Args:
        url: ``grpc://HOST:PORT``, ``grpc+tls://...`` or ``grpc+unix://...``.
        token: bearer token, sent with every call.
        options: bounds and deadlines.
        tls: what is checked and shown on ``grpc+tls://``.

    Raises:
        InvalidInput: the URL, or ``tls`` with a URL without TLS.
        Unauthenticated: the server does not know the token.
        Unreachable: nobody answers there within ``connect_s``.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        options: ClientOptions | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._url = check_url(url)
        if tls is not None and not self._url.startswith("grpc+tls:"):
            raise InvalidInput(f"store URL {url!r}: tls is for grpc+tls://HOST:PORT")
        self._token = check_token(token)
        self._tls = tls
        self._options = options or ClientOptions()
        self._links: dict[int, Link] = {}
        self._closed = False
        self._link().connection.ensure()
        self._link().cluster.look()
        # gRPC does not live through a fork: it has to be gone from the parent at that moment.
        os.register_at_fork(before=_let_go_hook(weakref.ref(self)))
        weakref.finalize(self, _close_link, self._links, EXIT_S)

    @property
    def url(self) -> str:
        return self._url

    @property
    def puts_in_background(self) -> bool:
        return True

    @property
    def placer(self) -> Placer | None:
        link = self._link()
        return link.writes if link.cluster.is_alone else link.cluster

    def shard(self) -> int:
        return self._link().cluster.place()

    def counters(self) -> dict[str, float]:
        """What this client counts: puts that waited for room, for how long, and bytes in flight now."""
        link = self._link()
        puts = link.cluster.all_puts()
        return {
            **link.cluster.counters(),
            "put_waits": sum(one.waits for one in puts),
            "put_waited_s": sum(one.waited_s for one in puts),
            "put_in_flight_bytes": sum(one.in_flight_bytes for one in puts),
        }

    def execute(self, command: Command) -> Reply:
        """Answer one command: a call with a deadline, and one retry with the same request id."""
        if isinstance(command, OpenSession | FinalizeSession):
            return Reply(body=self._patiently(lambda: self._link().commits.ask(command)))
        if isinstance(command, Claim) and command.wait_s > self._options.wait_piece_s:
            return self._wait_for_claim(command)
        if isinstance(command, RunQuery):
            return self._query(command)
        if isinstance(command, GetStats):
            stats = self._ask(command).body
            assert isinstance(stats, Stats)
            mine = {f"client_{name}": value for name, value in self.counters().items()}
            return Reply(body=Stats(values={**stats.values, **mine}))
        return self._ask(command)

    def commit(
        self, step: StepCommit, puts: Sequence[PutHandle] = (), wait_s: float | None = None
    ) -> StepResult:
        riding = wait_for_others(puts, wait_s)
        result = self._commit_with(step, riding)
        for put in riding if result is None or result.error is not None else ():
            put.wait(wait_s)
        if result is None or (riding and isinstance(result.failure, ChunkLost)):
            # Chunks that could not ride are stored by now, or were stored all along.
            result = self._patiently(lambda: self._link().commits.commit(step))
        result.check()
        return result

    def _commit_with(self, step: StepCommit, riding: Sequence[RidingPut]) -> StepResult | None:
        """Send a step behind what rides with it; None: its puts may have to be sent before it can come."""
        try:
            return self._patiently(lambda: self._link().commits.commit(step))
        except Unavailable:
            if not riding:
                raise
            return None

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        return self._link().cluster.put(field, chunks)

    def read(self, request: Read) -> Iterator[Rows]:
        link = self._link()
        if not shard_numbers(request.spans).any():
            return link.main.read(request)
        return read_shards(link.cluster, request)

    @property
    def reads_in_place(self) -> bool:
        return False

    @property
    def reads_at_once(self) -> int:
        link = self._link()
        return copying_threads() if link.cluster.is_alone and link.main.host.host.proof() is not None else 1

    def bundle_writer(self, run: RunInfo) -> FlightBundleWriter:
        link, options = self._link(), self._options
        bound = options.bundle_staging_bytes_max
        return FlightBundleWriter(self, link.cluster, link.staging, run, bound, options.put_room_s)

    def end_lease(self, run: str, lease_id: str) -> None:
        # It expires by itself where nobody can be told.
        with contextlib.suppress(ArrowTQError):
            self._ask(CloseBundle(run=run, lease_ids=[lease_id]))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _close_link(self._links, CLOSE_S)

    def _ask(self, command: Command) -> Reply:
        connection = self._link().connection
        deadline_s = self._options.action_s + (command.wait_s if isinstance(command, Claim) else 0.0)
        body = command.model_dump_json().encode()

        def call() -> bytes:
            return connection.retrying(lambda: connection.action(command.verb, body, deadline_s))

        return unpack_reply(command, self._patiently(call))

    def _patiently(self, call: Callable[[], Answer]) -> Answer:
        """A call that may be repeated: in a cluster, until its catalog is back from a restart."""
        until = time.monotonic() + self._options.catalog_wait_s
        while True:
            try:
                return call()
            except Unreachable:
                if self._link().cluster.is_alone or time.monotonic() >= until:
                    raise
            time.sleep(self._options.retry_pause_s)

    def _wait_for_claim(self, command: Claim) -> Reply:
        """A long wait in pieces. Their request ids follow from the first: a retry walks the same ones."""
        until = time.monotonic() + command.wait_s
        number = 0
        while True:
            wait_s = min(max(until - time.monotonic(), 0.0), self._options.wait_piece_s)
            request_id = _numbered(command.request_id, number)
            reply = self._ask(command.model_copy(update={"wait_s": wait_s, "request_id": request_id}))
            if not isinstance(reply.body, ClaimInfo) or reply.body.segments or time.monotonic() >= until:
                return reply
            number += 1

    def _query(self, command: RunQuery) -> Reply:
        """SQL as a stream: an answer may be larger than one message."""
        connection = self._link().connection
        ticket = SqlTicket(query=command.query, run=command.run).model_dump_json().encode()
        deadline_s = self._options.action_s

        def call() -> bytes:
            reader = connection.get(ticket, deadline_s, command.verb)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, connection.schema(reader, command.verb, deadline_s)) as writer:
                for batch in connection.batches(reader, command.verb, deadline_s):
                    writer.write_batch(batch)
            return bytes(sink.getvalue())

        return Reply(body=Empty(), blobs=[self._patiently(lambda: connection.retrying(call))])

    def _link(self) -> Link:
        if self._closed:
            raise Conflict(f"store {self._url!r} was closed")
        pid = os.getpid()
        link = self._links.get(pid)
        if link is None:
            # setdefault is atomic: threads of one process agree on one link. A parent's stays untouched.
            link = self._links.setdefault(pid, Link(self._url, self._token, self._options, self._tls))
        return link

    def let_go(self) -> None:
        """Before a fork: end idle streams and the connection; calls under way are left to end."""
        until = time.monotonic() + self._options.fork_wait_s
        if not _grpc_runs():
            return
        link = self._links.pop(os.getpid(), None)
        if link is not None:
            link.cluster.finish(self._options.fork_wait_s / 2)
            link.main.writes.close(self._options.fork_wait_s / 2)
            link.commits.finish(max(until - time.monotonic(), 0.0))
            link.main.finish(max(until - time.monotonic(), 0.0))
            del link
            # Errors that are still around may hold the connection in a cycle.
            gc.collect()
        while _grpc_runs() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(FORK_SETTLE_S)


def _close_link(links: dict[int, Link], timeout_s: float) -> None:
    """Close what this process opened; a parent's links are the parent's."""
    link = links.pop(os.getpid(), None)
    if link is not None:
        link.close(timeout_s)


def _let_go_hook(backend: weakref.ref[FlightBackend]) -> Callable[[], None]:
    def before() -> None:
        alive = backend()
        if alive is not None:
            alive.let_go()

    return before


def _grpc_runs() -> bool:
    """Whether gRPC's own threads run in this process (known on Linux alone)."""
    for name in Path("/proc/self/task").glob("*/comm"):
        try:
            if name.read_text().strip() == GRPC_THREAD:
                return True
        except OSError:
            # The thread ended meanwhile.
            continue
    return False


def _numbered(request_id: str, number: int) -> str:
    if not number:
        return request_id
    return hashlib.blake2b(f"{request_id}:{number}".encode(), digest_size=16).hexdigest()
