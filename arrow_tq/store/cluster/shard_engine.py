"""A shard in a process of its own: takes and gives chunks, and knows nothing of sessions and segments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import pyarrow as pa

from arrow_tq.backend import BundleWriter, Placer, PutHandle, Read, Rows
from arrow_tq.client.connection import Connection
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.shard_reads import shard_numbers
from arrow_tq.logs import logger
from arrow_tq.store.arriving import store_batch
from arrow_tq.store.cluster.catalog_link import CatalogLink
from arrow_tq.store.cluster.far_reads import FarReads
from arrow_tq.store.cluster.held import held, held_rows
from arrow_tq.store.cluster.membership import Membership
from arrow_tq.store.cluster.shard_engine_config import ShardEngineConfig
from arrow_tq.store.directory import Directory
from arrow_tq.store.holding import of_run
from arrow_tq.store.host_share import HOST_COMMANDS, HostShare
from arrow_tq.store.reading import Reader
from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardConfig
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.cluster import (
    ConfirmChunks,
    Confirmed,
    ConfirmedChunk,
    Digest,
    DigestChunks,
    FetchChunks,
    GetCluster,
    GetRun,
    TendChunks,
    ToShard,
)
from arrow_tq_schemas.commands import (
    Claim,
    Command,
    Done,
    GetPressure,
    GetSegments,
    GetStats,
    Pressure,
    Reply,
    RunInfo,
    Stats,
    StepCommit,
    StepResult,
    StreamAnswers,
    StreamMessage,
    Wire,
    stream_answer,
)
from arrow_tq_schemas.errors import (
    ArrowTQError,
    Conflict,
    MalformedMessage,
    NotFound,
    Unavailable,
    Unsupported,
)
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.tickets import PutStream

PENDING_POLL_S = 0.25
"""How often the catalog is asked for chunks whose step is still open."""


class ShardEngine:
    """What a server of role ``shard`` serves. Thread-safe.

    Opening recovers the extents; ``start`` joins the catalog, in the background and for as long as it takes.
    Until then, and once another process has taken its place, nothing is answered.
    """

    def __init__(self, config: ShardEngineConfig) -> None:
        self.config = config
        self._directory = Directory.claim(config.data_dir, config.server.url)
        try:
            memory_dir = self._directory.memory_dir(config.memory_dir)
            capacity = config.capacity_bytes or self._directory.default_capacity_bytes(memory_dir)
            self._shard = Shard(
                ShardConfig(data_dir=config.data_dir, memory_dir=memory_dir, capacity_bytes=capacity)
            )
        except BaseException:
            self._directory.release()
            raise
        self._catalog = CatalogLink(self._connect(config.catalog_url))
        self._far = None
        if config.cache_bytes:
            self._far = FarReads(self._catalog, self._connect, config.cache_bytes)
        self._reader = Reader(self._shard, self._catalog, PENDING_POLL_S)
        self._host_share = HostShare(
            *(memory_dir, self._reader, self._shard.grants, self._catalog, self._own_number),
            host=config.server.host,
        )
        self._membership = Membership(
            *(config.data_dir, self._directory.lock_id(), config.server, self._catalog, self._shard),
            *(config.orphan_ttl_s, self._far),
        )
        self._closed = False
        logger("arrow_tq.shard").info("shard opened", data=str(config.data_dir), capacity_bytes=capacity)

    def start(self) -> None:
        """Join, and go on beating."""
        self._membership.start()

    @property
    def is_ready(self) -> bool:
        """Whether the catalog counts on this process."""
        return self._membership.joined

    @property
    def url(self) -> str:
        return self.config.server.url

    @property
    def puts_in_background(self) -> bool:
        return False

    @property
    def placer(self) -> Placer | None:
        return None

    @property
    def reads_in_place(self) -> bool:
        return False

    @property
    def reads_at_once(self) -> int:
        return 1

    def bundle_writer(self, run: RunInfo) -> BundleWriter:
        raise self._elsewhere("put of a bundle")

    def end_lease(self, run: str, lease_id: str) -> None:
        """Leases are the catalog's."""

    def shard(self) -> int:
        return self._membership.number or 0

    def has_run(self, run: str) -> bool:
        """Whether there is such a run."""
        try:
            self._catalog.run_info(run)
        except NotFound:
            return False
        return True

    def check_serving(self) -> None:
        """Raises ``Unavailable`` where this process does not hold the shard now."""
        self._membership.check()

    def field(self, run: str, name: str) -> Field:
        """The declared field; raises ``NotFound``."""
        return self._catalog.field(run, name)

    # -- commands ------------------------------------------------------------------------------

    def execute(self, command: Command) -> Reply:
        """What the catalog asks, and what is known here; the rest is for the catalog."""
        self._check_open()
        if isinstance(command, ToShard):
            with held(partial(self._membership.check_named, command.number, command.epoch)):
                return self._answer(command)
        if isinstance(command, HOST_COMMANDS):
            with held(self._membership.check):
                return self._host_share.execute(command)
        if isinstance(command, GetStats):
            return Reply(body=Stats(values=self.stats()))
        if isinstance(command, GetPressure):
            return Reply(body=self._pressure())
        if isinstance(command, GetSegments):
            return self._catalog.segments(command)
        if isinstance(command, GetCluster):
            return self._catalog.cluster()
        if isinstance(command, GetRun):
            return Reply(body=self._catalog.run_info(command.run))
        raise self._elsewhere(command.verb)

    def _answer(self, command: ToShard) -> Reply:
        ids = [ChunkId.from_hex(name) for name in command.ids]
        if isinstance(command, ConfirmChunks):
            # Kept first: what is seen to be here then stays.
            self._shard.keep_unpinned(ids)
            found = [self._header(one, command.run) for one in ids]
            self.sync(command.run)
            return Reply(body=Confirmed(chunks=found, used_bytes=max(self._shard.level()[0], 0)))
        if isinstance(command, FetchChunks):
            chunks = [self._shard.get(one) for one in ids]
            headers = [None if one is None else _confirmed(one.header) for one in chunks]
            blobs = [blob for one in chunks for blob in _blobs(one)]
            return Reply(body=Confirmed(chunks=headers), blobs=blobs)
        if isinstance(command, DigestChunks):
            return Reply(body=Digest(sha256=self._shard.sha256(ids)))
        assert isinstance(command, TendChunks)
        own = of_run(self._shard, command.run, ids)
        count = self._shard.keep_unpinned(own) if command.keep else self._shard.drop_unpinned(own)
        return Reply(body=Done(count=count))

    def _header(self, chunk_id: ChunkId, run: str) -> ConfirmedChunk | None:
        header = self._shard.header(chunk_id)
        return None if header is None or header.run != run else _confirmed(header)

    def claim(self, command: Claim, is_gone: Callable[[], bool]) -> Reply:
        raise self._elsewhere(command.verb)

    def commit(
        self, step: StepCommit, puts: Sequence[PutHandle] = (), wait_s: float | None = None
    ) -> StepResult:
        raise self._elsewhere("commit")

    def answer(self, message: StreamMessage) -> StreamAnswers:
        """Chunks in granted files, of several files at a time; the rest is the catalog's."""
        if message.steps or message.opens or message.finalizes:
            raise self._elsewhere("commit stream")
        return StreamAnswers(answers=[stream_answer(self._outcome(one)) for one in message.adopts])

    def _outcome(self, command: Command) -> Wire | ArrowTQError:
        try:
            return self.execute(command).body
        except ArrowTQError as error:
            return error

    def query(self, query: str, run: str | None) -> pa.Table:
        raise self._elsewhere("sql")

    # -- payload -------------------------------------------------------------------------------

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        raise self._elsewhere("put in process")

    def receive(
        self, stream: PutStream, headers: Sequence[ChunkHeader], batch: pa.RecordBatch
    ) -> list[ArrowTQError | None]:
        """Store the chunks of a batch that came from the network, after validating all of it.

        Gives for each why it was refused (``MalformedMessage``: also a chunk of another shard,
        ``StaleEpoch``, ``Conflict``, ``StoreFull``), or None.

        Raises:
            MalformedMessage: the batch is not what its stream and headers say; nothing was stored.
            Unavailable: this process does not hold the shard now.
        """
        self._check_open()
        # Asked again before the ack: what is stored after a stop is nobody's (``sync``).
        self._membership.check()
        info = self._catalog.run_info(stream.run, max(header.epoch for header in headers))
        field = self.field(stream.run, stream.field)
        return store_batch(self._shard, stream, field, info, headers, batch, self._check_place)

    def _check_place(self, header: ChunkHeader) -> None:
        shard, number = header.chunk_id.shard, self._membership.number
        if shard != number:
            raise MalformedMessage(f"chunk {header.id}: of shard {shard}, this is shard {number}")

    def sync(self, run: str) -> None:
        """Return when what was put before is as durable as the run declares.

        Raises:
            Unavailable: this process does not hold the shard now: what was put to it does not count.
        """
        if self._catalog.run_info(run).durability == "disk":
            self._shard.sync(run)
        self._membership.check()

    def read(self, request: Read) -> Iterator[Rows]:
        """Zero-copy rows, one block a span. Whoever sends them asks ``check_serving`` for each message."""
        self._check_open()
        self._membership.check()
        return held_rows(self._rows(request), self._membership.check)

    def _rows(self, request: Read) -> Iterator[Rows]:
        numbers = shard_numbers(request.spans)
        if (numbers == self._membership.number).all():
            return self._reader.read(request)
        if self._far is None or (numbers == self._membership.number).any():
            raise Unavailable(f"chunks of shard {int(numbers[0])}: this is shard {self._membership.number}")
        return self._far.read(request)

    # -- the shard -----------------------------------------------------------------------------

    def pressure_of(self, runs: Collection[str]) -> Pressure:
        """This shard's fill: sessions and segments are the catalog's to count."""
        return self._pressure()

    def stats(self) -> dict[str, float]:
        """Gauges and counters by name, labels in braces as Prometheus writes them."""
        usage = self._shard.usage()
        values: dict[str, float] = {
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "zombie_bytes": usage.zombie_bytes,
            "recycled_bytes": usage.recycled_bytes,
            "extents": usage.extents,
            "chunks": usage.chunks,
            "corrupt_chunks_total": usage.corrupt_chunks,
            "chunks_read_total": self._reader.chunks_read,
            "bytes_read_total": self._reader.bytes_read,
            "orphans_reaped_total": self._membership.orphans_reaped,
            "joined": float(self._membership.joined),
            **self._host_share.counters(),
        }
        if self._far is not None:
            values |= self._far.cache.counters()
        for (run, tier), size in usage.by_run_and_tier.items():
            values[f'bytes{{run="{run}",tier="{tier}"}}'] = size
        return values

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._membership.stop()
        self._host_share.close()
        if self._far is not None:
            self._far.close()
        self._catalog.close()
        self._shard.close()
        self._directory.release()

    def _connect(self, url: str) -> Connection:
        tls = self.config.tls if url.startswith("grpc+tls:") else None
        return Connection(url, self.config.token, ClientOptions(connect_s=3.0), tls)

    def _own_number(self) -> int | None:
        return self._membership.number

    def _pressure(self) -> Pressure:
        usage = self._shard.usage()
        return Pressure(
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            fill=usage.used_bytes / usage.capacity_bytes,
            soft_mark=self.config.soft_mark,
            oldest_unclaimed_s=0.0,
            open_sessions=0,
            unclaimed_segments=0,
            waiters=0,
        )

    def _elsewhere(self, what: str) -> Unsupported:
        url = self.config.catalog_url
        return Unsupported(f"{what}: this server is a shard; connect to its catalog at {url}", url=url)

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict(f"shard {self.url!r} was closed")
        self._directory.check_process()


def _confirmed(header: ChunkHeader) -> ConfirmedChunk:
    return ConfirmedChunk(
        run=header.run,
        epoch=header.epoch,
        field=header.field,
        start=header.start,
        rows=header.rows,
        checksum=header.checksum,
    )


def _blobs(chunk: Chunk | None) -> tuple[bytes, bytes]:
    """Values, and which rows are valid; empty where all are, or where there is no chunk."""
    if chunk is None:
        return b"", b""
    return chunk.values.tobytes(), b"" if chunk.valid is None else chunk.valid.tobytes()
