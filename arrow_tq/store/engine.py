"""The engine: shard and catalog of one store, in this process. ``arrow_tq.open`` and the server use it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from arrow_tq.backend import PutHandle, Read, Rows, copying_threads
from arrow_tq.calls import write_table
from arrow_tq.logs import logger
from arrow_tq.sql import SqlService
from arrow_tq.store.admission import Admission
from arrow_tq.store.arriving import store_batch
from arrow_tq.store.attempts import Attempts
from arrow_tq.store.bundle_tables import BundleTables
from arrow_tq.store.bundles import EngineBundles, EngineBundleWriter
from arrow_tq.store.catalog import Catalog, CatalogConfig
from arrow_tq.store.catalog.writer import Beside
from arrow_tq.store.cluster.answers import CLUSTER_COMMANDS, FarShards, answer_cluster, chunk_holder
from arrow_tq.store.committing import Commits
from arrow_tq.store.config import EngineConfig
from arrow_tq.store.directory import Directory
from arrow_tq.store.figures import Figures
from arrow_tq.store.holding import attached_by
from arrow_tq.store.host_share import HOST_COMMANDS, HostShare
from arrow_tq.store.placing import STORED, EnginePlacer, Stored
from arrow_tq.store.reading import Reader
from arrow_tq.store.rewrites import Rewrites
from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardConfig
from arrow_tq.store.together import Together
from arrow_tq.store.upkeep import Upkeep
from arrow_tq_schemas.blobs import BLOB_FIELD
from arrow_tq_schemas.bundles import BUNDLE_FIELD
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.cluster import GetRun
from arrow_tq_schemas.commands import (
    AbandonStep,
    Claim,
    Command,
    CommitSteps,
    Done,
    DropChunks,
    Durability,
    Empty,
    GetPressure,
    GetStats,
    KeepChunks,
    OpenSession,
    PutValues,
    Reply,
    RunInfo,
    RunQuery,
    Stats,
    StepCommit,
    StepResult,
    StepResults,
    StreamAnswers,
    StreamMessage,
    Wire,
)
from arrow_tq_schemas.errors import ArrowTQError, Conflict, MalformedMessage, NotFound, Unsupported
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.tickets import PutStream


class Engine:
    """Implements ``Backend`` in this process, and what the server needs beside it.

    Opening recovers what an earlier process left: extents are walked or loaded, and their chunks
    reconciled with the catalog, which owns each chunk's state.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._directory = Directory.claim(config.data_dir, config.url)
        try:
            self._start(config)
        except BaseException:
            self._directory.release()
            raise

    def _start(self, config: EngineConfig) -> None:
        memory_dir = self._directory.memory_dir(config.memory_dir)
        capacity_bytes = config.capacity_bytes or self._directory.default_capacity_bytes(memory_dir)
        capacity_bytes = min(capacity_bytes, config.memory_bytes_max)
        self._shard = Shard(
            ShardConfig(
                number=0,
                data_dir=config.data_dir,
                memory_dir=memory_dir,
                capacity_bytes=capacity_bytes,
                run_quota_bytes=config.run_quota_bytes,
                run_quotas=config.run_quotas,
            )
        )
        self._chunks = chunk_holder(config, self._shard)
        self._catalog = Catalog(
            CatalogConfig(
                path=config.data_dir / "catalog.sqlite",
                blob_bytes_max=config.blob_bytes_max,
                keep_marks=config.keep_marks,
                keep_released_s=config.keep_released_s,
            ),
            *(self._chunks, self._chunks.drop),
        )
        if config.url is not None:
            self._catalog.grant_grace()
        self._sql = SqlService(self._catalog, config.sql)
        self._fields: dict[tuple[str, str], Field] = {}
        self._reader = Reader(self._shard, self._catalog)
        self._host_share = HostShare(memory_dir, self._reader, self._shard.grants, self, self._number)
        self._rewrites = Rewrites(self._chunks, self._catalog)
        self._catalog.tell_created(self._rewrites.created)
        self._attempts = Attempts(self._chunks, self._catalog)
        self._commits = Commits(self._commit_together)
        self._admission = Admission(self._chunks, self._catalog, config.soft_mark)
        self._together = Together(self._host_share, self._admission, self._catalog, self._commit_beside)
        self._placer = EnginePlacer(self, self._shard)
        if isinstance(self._chunks, FarShards):
            self._chunks.use_fields(self.field)
        self._bundles = EngineBundles(self._shard, self._chunks, self._catalog)
        self._bundle_tables = BundleTables(self, self._catalog, config.sql.memory_bytes // 2)
        self._closing = threading.Lock()
        self._closed = False
        self._upkeep = Upkeep(
            *(self._shard, self._catalog, config.orphan_ttl_s, config.upkeep_period_s, config.soft_mark),
            self._bundles.tend,
        )
        self._figures = Figures(
            *(self._shard, self._chunks, self._catalog, self._reader, self._host_share, self._bundles),
            *(self._admission, self._upkeep, config.soft_mark),
        )
        self.stats = self._figures.of_process
        self.pressure_of = self._figures.pressure_of
        self._upkeep.reconcile()
        self._upkeep.start()
        logger("arrow_tq.engine").info(
            "store opened", data=str(config.data_dir), memory=str(memory_dir), capacity_bytes=capacity_bytes
        )

    @property
    def url(self) -> str:
        return self.config.url or str(self.config.data_dir)

    @property
    def puts_in_background(self) -> bool:
        return False

    @property
    def placer(self) -> EnginePlacer:
        return self._placer

    def shard(self) -> int:
        return 0

    def has_run(self, run: str) -> bool:
        """Whether there is such a run."""
        try:
            self._catalog.run_info(run)
        except NotFound:
            return False
        return True

    def check_serving(self) -> None:
        """Nobody else serves this store: its directory is locked."""

    def field(self, run: str, name: str) -> Field:
        """The declared field, or that of blobs or bundles; raises ``NotFound`` naming those of the run."""
        if name == BUNDLE_FIELD.name:
            self._catalog.run_info(run)
            return BUNDLE_FIELD
        found = self._fields.get((run, name))
        if found is None:
            declared = {str(one["name"]): Field.from_json(one) for one in self._catalog.run_info(run).fields}
            if name not in (*declared, BLOB_FIELD.name):
                raise NotFound(f"run {run!r} has no field {name!r}; it has {', '.join(declared)}", field=name)
            declared[BLOB_FIELD.name] = BLOB_FIELD
            self._fields.update({(run, one.name): one for one in declared.values()})
            found = declared[name]
        return found

    # -- commands ------------------------------------------------------------------------------

    def execute(self, command: Command) -> Reply:
        """Answer one command, whichever it is."""
        self._check_open()
        if isinstance(command, CommitSteps):
            return Reply(body=StepResults(results=self.commit_many(command.steps)))
        if isinstance(command, RunQuery):
            return Reply(body=Empty(), blobs=[write_table(self.query(command.query, command.run))])
        if isinstance(command, GetStats):
            return Reply(body=Stats(values=self._figures.of_store()))
        if isinstance(command, GetPressure):
            return Reply(body=self._figures.pressure())
        if isinstance(command, DropChunks):
            return Reply(body=Done(count=self._chunks.free(command.run, _ids(command))))
        if isinstance(command, AbandonStep):
            with self._rewrites.changing(command.run, command.session_id):
                return self._catalog.execute(command)
        if isinstance(command, KeepChunks):
            return Reply(body=Done(count=self._chunks.keep(command.run, _ids(command))))
        if isinstance(command, GetRun):
            return Reply(body=self._catalog.run_info(command.run))
        if isinstance(command, CLUSTER_COMMANDS):
            return Reply(body=answer_cluster(command, self._chunks, self._catalog))
        if isinstance(command, HOST_COMMANDS):
            return self._host_share.execute(command)
        if isinstance(command, OpenSession):
            self._admission.admit(command)
        if isinstance(command, PutValues):
            with self._chunks.confirming(attached_by([command])):
                return self._catalog.execute(command)
        return self._bundles.execute(command) or self._catalog.execute(command)

    def claim(self, command: Claim, is_gone: Callable[[], bool]) -> Reply:
        """Answer a claim; nothing is taken for a claimer that ``is_gone`` after it waited."""
        self._check_open()
        return self._catalog.claim(command, is_gone)

    def commit(
        self, step: StepCommit, puts: Sequence[PutHandle] = (), wait_s: float | None = None
    ) -> StepResult:
        for put in puts:
            put.wait(wait_s)
        (result,) = self.commit_many([step])
        result.check()
        return result

    def commit_many(self, steps: Sequence[StepCommit]) -> list[StepResult]:
        """Commit each step by itself, in order; errors are in the results."""
        self._check_open()
        return self._commits.commit(steps)

    def answer(self, message: StreamMessage) -> StreamAnswers:
        """Answer a message of a commit stream; errors are in the answers."""
        self._check_open()
        return self._together.answer(message)

    def _commit_beside(
        self, steps: Sequence[StepCommit], beside: Beside[Wire] | None = None
    ) -> list[StepResult]:
        """Steps of one message; with operations beside they are a commit worth its while by themselves."""
        return self._commits.commit(steps) if beside is None else self._commit_together(steps, beside)

    def _commit_together(
        self, steps: Sequence[StepCommit], beside: Beside[Wire] | None = None
    ) -> list[StepResult]:
        with self._chunks.confirming(attached_by(steps)):
            return self._attempts.check(steps, self._rewrites.commit(steps, beside))

    def query(self, query: str, run: str | None) -> pa.Table:
        """SQL over the metadata of one run, or of all."""
        self._check_open()
        if run is not None:
            self._catalog.run_info(run)
        with self._bundle_tables.lent(query, run) as (text, tables):
            return self._sql.query(text, run, tables)

    # -- payload -------------------------------------------------------------------------------

    def put(self, field: Field, chunks: Sequence[Chunk]) -> Stored:
        """Store chunks that this process made; on disk when this returns, where the run says so."""
        self._check_open()
        for chunk in chunks:
            durability = self._catalog.run_info(chunk.header.run).durability
            self._shard.put(field, chunk, durability)
        if chunks:
            self.sync(chunks[0].header.run)
        return STORED

    def receive(
        self, stream: PutStream, headers: Sequence[ChunkHeader], batch: pa.RecordBatch
    ) -> list[ArrowTQError | None]:
        """Store the chunks of a batch that came from the network, after validating all of it.

        Gives for each why it was refused (``MalformedMessage``, ``StaleEpoch``, ``Conflict``,
        ``StoreFull``), or None.

        Raises:
            MalformedMessage: the batch is not what its stream and headers say; nothing was stored.
        """
        self._check_open()
        field = self.field(stream.run, stream.field)
        info = self._catalog.run_info(stream.run)
        return store_batch(self._shard, stream, field, info, headers, batch, self._check_place)

    def run_info(self, run: str, epoch: int = 0) -> RunInfo:
        """The run's declaration and epoch, always the newest; raises ``NotFound`` naming those that exist."""
        return self._catalog.run_info(run)

    def durability(self, run: str) -> Durability:
        """What the run declares."""
        self._check_open()
        return self._catalog.run_info(run).durability

    def sync(self, run: str) -> None:
        """Return when what was put before is as durable as the run declares."""
        if self._catalog.run_info(run).durability == "disk":
            self._shard.sync(run)

    def read(self, request: Read) -> Iterator[Rows]:
        """Zero-copy rows, one block a span."""
        self._check_open()
        return self._chunks.read(request, self._reader.read)

    @property
    def reads_in_place(self) -> bool:
        return True

    @property
    def reads_at_once(self) -> int:
        return copying_threads()

    def bundle_writer(self, run: RunInfo) -> EngineBundleWriter:
        """For a new bundle; its values are written into the extent where they are to lie."""
        self._check_open()
        return self._bundles.writer(run)

    def end_lease(self, run: str, lease_id: str) -> None:
        self._bundles.leases.end_soon(lease_id)

    def close(self) -> None:
        if self._directory.pid != os.getpid():
            # A fork must not seal extents, or checkpoint the database, of the process that lives on.
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._upkeep.stop()
        self._host_share.close()
        self._sql.close()
        self._catalog.close()
        if isinstance(self._chunks, FarShards):
            self._chunks.close()
        self._shard.close()
        self._directory.release()

    def _number(self) -> int | None:
        """Of the shard in this process; None where it is a catalog alone."""
        cluster = self.config.cluster
        return self._shard.config.number if cluster is None or cluster.holds_chunks else None

    def _check_place(self, header: ChunkHeader) -> None:
        number = header.chunk_id.shard
        if self._number() is None:
            raise Unsupported("put: this server is a catalog; chunks go to its shards (their map: cluster)")
        if number != self._shard.config.number:
            raise MalformedMessage(
                f"chunk {header.id}: of shard {number}, this is shard {self._shard.config.number}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict(f"store {self.url!r} was closed")
        self._directory.check_process()


def _ids(command: DropChunks | KeepChunks) -> list[ChunkId]:
    return [ChunkId.from_hex(name) for name in command.chunk_ids]
