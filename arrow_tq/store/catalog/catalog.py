"""``Catalog``: the metadata of a store, and the owner of each chunk's state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import pyarrow as pa

from arrow_tq.calls import write_table
from arrow_tq.store.catalog import (
    bundle_rows,
    changes,
    leases,
    records,
    segments,
    sessions,
)
from arrow_tq.store.catalog.blob_plans import check_size
from arrow_tq.store.catalog.blobs import find_blob
from arrow_tq.store.catalog.chunk_rows import count_missing, read_states
from arrow_tq.store.catalog.claiming import Claiming
from arrow_tq.store.catalog.claims import claim_table, keep_table
from arrow_tq.store.catalog.columns import read_kinds
from arrow_tq.store.catalog.config import CatalogConfig, CatalogGauges, ChunkPins
from arrow_tq.store.catalog.database import Readers, checkpoint, open_checkpointer, open_writer
from arrow_tq.store.catalog.expiry import expire_all, something_is_due
from arrow_tq.store.catalog.gauges import read_gauges
from arrow_tq.store.catalog.keeping import Keeping
from arrow_tq.store.catalog.late_values import prepare_values, store_values
from arrow_tq.store.catalog.lifecycles import Lifecycles
from arrow_tq.store.catalog.operations import Operations
from arrow_tq.store.catalog.requests import answered, once
from arrow_tq.store.catalog.run_gauges import RunGauges, read_run_gauges
from arrow_tq.store.catalog.runs import CommittedRuns, WriterRuns
from arrow_tq.store.catalog.step_commits import StepCommits
from arrow_tq.store.catalog.waiting import Waiters
from arrow_tq.store.catalog.writer import Again, Apply, Writer
from arrow_tq_schemas.commands import (
    AttachClaim,
    Claim,
    Command,
    Empty,
    FinalizeSession,
    FindBlob,
    GetClaim,
    GetSegments,
    GetSession,
    ListSegments,
    Mark,
    Mutation,
    OpenRun,
    PutValues,
    Reply,
    RunInfo,
    Wire,
)
from arrow_tq_schemas.errors import Busy, InvalidInput, Unsupported
from arrow_tq_schemas.ids import ChunkId

Result = TypeVar("Result")
PUT_TRIES_MAX = 20
"""Times that late values are composed again because another field was put meanwhile."""


class Catalog:
    """SQLite metadata of one store. All methods may be called from any thread.

    What a command changes is committed when ``execute`` or ``commit_steps`` returns; the chunks that it
    freed were handed to ``on_released`` then.

    Args:
        config: where the file is, and its bounds.
        chunks: which chunks are stored, and which are attached to a step.
        on_released: called with chunks (all layer groups) that nothing holds any more.
    """

    def __init__(
        self, config: CatalogConfig, chunks: ChunkPins, on_released: Callable[[list[ChunkId]], None]
    ) -> None:
        self._config = config
        self._pins = chunks
        self._on_released = on_released
        self._waiters = Waiters()
        self._writer = Writer(open_writer(config), config, self._waiters)
        self._readers = Readers(config)
        self._checkpointer = open_checkpointer(config.path)
        self._runs = CommittedRuns(self._readers)
        self._writer_runs = WriterRuns()
        self._operations = Operations(
            *(self._readers, self._runs, self._writer_runs, self._pins, config.keep_marks)
        )
        self._steps = StepCommits(
            *(config, self._readers, self._writer, self._runs, self._writer_runs, chunks, on_released)
        )
        self._lifecycles = Lifecycles(
            *(self._readers, self._writer, self._runs, self._writer_runs, self._operations, on_released)
        )
        self.begin_many = self._lifecycles.begin
        self.finish_many = self._lifecycles.finish
        # Bound methods: nothing is added to what is called for each step.
        self.commit_steps = self._steps.commit_steps
        self.token_path = self._steps.token_path
        self.step_receipts = self._steps.step_receipts
        self._claiming = Claiming(self._readers, self._runs, self._writer_runs, self._waiters, self._mutate)
        self.keeping = Keeping(self._readers, self._run)
        """What marks keep of what was released."""
        self._upkeep = threading.Lock()
        self._gauges: tuple[float, CatalogGauges] | None = None
        self._closed = False
        with self._readers.snapshot() as connection:
            if connection.execute("SELECT 1 FROM runs WHERE durability = 'disk' LIMIT 1").get is not None:
                self._writer.require_full_sync()

    def tell_created(self, created: Callable[[str, str], None]) -> None:
        """Have ``created`` told run and id of each new session, before any step of it is committed."""
        self._operations.created = created

    # -- commands ------------------------------------------------------------------------------

    def execute(self, command: Command) -> Reply:
        """Answer a command; raises the errors that its operation documents.

        A ``Mutation`` that was answered before, by request id, gets the same reply and changes nothing.
        """
        try:
            return self._execute(command)
        except UnicodeEncodeError as error:
            raise InvalidInput(f"{command.verb}: text with a lone surrogate at {error.start}") from None
        except OverflowError as error:
            raise InvalidInput(f"{command.verb}: an integer beyond 64 bits: {error}") from None

    def _execute(self, command: Command) -> Reply:
        if isinstance(command, GetSegments):
            return self._get_segments(command)
        if isinstance(command, ListSegments):
            return self._list_segments(command)
        if isinstance(command, GetSession | GetClaim):
            run = self._runs.get(command.run)
            with self._readers.snapshot() as connection:
                return records.answer(connection, run, command)
        if isinstance(command, Claim):
            return self.claim(command)
        if isinstance(command, FinalizeSession):
            return Reply(body=self._lifecycles.execute(command))
        if isinstance(command, FindBlob):
            return Reply(body=self._find_blob(command))
        if isinstance(command, PutValues):
            return Reply(body=self._put_values(command))
        if not isinstance(command, Mutation):
            raise Unsupported(f"the catalog does not answer {command.verb!r}")
        if isinstance(command, OpenRun) and command.durability == "disk":
            self._writer.require_full_sync()
        body = self._mutate(once(command, self._operations.operation(command)))
        if isinstance(command, Mark):
            self.keeping.free_spent()
        if isinstance(command, AttachClaim):
            return Reply(body=body, blobs=[self._claim_table(command.run, command.claim_id)])
        return Reply(body=body)

    def claim(self, command: Claim, is_gone: Callable[[], bool] = lambda: False) -> Reply:
        """Answer a claim; nothing is taken for a claimer that ``is_gone`` after it waited."""
        info = self._claiming.claim(command, is_gone)
        ipc = self._claim_table(command.run, info.claim_id)
        if not info.segments:
            return Reply(body=info, blobs=[ipc])
        self._run(keep_table(info.claim_id, ipc))
        # Again: where a retry of this call kept it first, that one counts.
        return Reply(body=info, blobs=[self._claim_table(command.run, info.claim_id)])

    def _find_blob(self, command: FindBlob) -> Wire:
        run = self._runs.get(command.run)
        if command.bytes is not None:
            check_size(command.bytes, self._config.blob_bytes_max, f"run {run.name!r}")
        with self._readers.snapshot() as connection:
            return find_blob(connection, run.id, command.blob_id, self._pins)

    def _put_values(self, command: PutValues) -> Wire:
        run = self._runs.get(command.run)
        for _ in range(PUT_TRIES_MAX):
            with self._readers.snapshot() as connection:
                known = answered(connection, command)
                if known is not None:
                    return known
                prepared = prepare_values(connection, run, command, self._pins)
            try:
                operation = store_values(prepared, self._writer_runs, command, self._pins)
                return self._mutate(once(command, operation))
            except Again:
                continue
        raise Busy(f"field {command.field!r}: its segments changed {PUT_TRIES_MAX} times while it was put")

    def _get_segments(self, command: GetSegments) -> Reply:
        run = self._runs.get(command.run)
        with self._readers.snapshot() as connection:
            table, manifests = segments.get_segments(connection, run, command)
        return Reply(body=Empty(), blobs=[write_table(table), *manifests])

    def _list_segments(self, command: ListSegments) -> Reply:
        run = None if command.run is None else self._runs.get(command.run)
        with self._readers.snapshot() as connection:
            table = segments.list_segments(connection, run, command)
        return Reply(body=Empty(), blobs=[write_table(table)])

    # -- what others ask -----------------------------------------------------------------------

    def run_info(self, run: str) -> RunInfo:
        """The run's declaration, epoch and policy version; raises ``NotFound`` naming those that exist."""
        return self._runs.get(run).info

    def session_goes_on(self, run: str, session_id: str) -> bool:
        """Whether this session is there and is open, or may still be finalized in its other view."""
        record = self._runs.get(run)
        with self._readers.snapshot() as connection:
            found = sessions.find_session(connection, record, session_id)
        return found is not None and found.status in (sessions.OPEN, sessions.FINALIZED)

    def chunk_states(self, ids: Sequence[ChunkId], run: str | None = None) -> list[str | None]:
        """committed, released, or None where no step attached it, or none of ``run``; of any layer group."""
        owner = None if run is None else self._runs.get(run).id
        with self._readers.snapshot() as connection:
            return read_states(connection, ids, owner)

    def missing(self, here: Collection[ChunkId], shard: int = 0) -> tuple[int, int]:
        """A shard's chunks (a layer group each) that should be readable and are not ``here``; their bytes."""
        with self._readers.snapshot() as connection:
            return count_missing(connection, here, shard)

    def bundle(self, run: str, bundle_id: str) -> bundle_rows.BundleRow:
        """A bundle that readers may find; raises ``NotFound``."""
        record = self._runs.get(run)
        with self._readers.snapshot() as connection:
            return bundle_rows.find_ready(connection, record, bundle_id)

    def run_of_bundle(self, bundle_id: str) -> str:
        """The run that a bundle belongs to; raises ``NotFound``."""
        with self._readers.snapshot() as connection:
            return bundle_rows.find_run(connection, bundle_id)

    def bundles_deleting(self) -> list[str]:
        """Ids of bundles whose bytes wait for readers."""
        with self._readers.snapshot() as connection:
            return bundle_rows.find_deleting(connection)

    def bundle_usage(self) -> dict[str, tuple[int, int]]:
        """By run, how many bundles are there, and their bytes."""
        with self._readers.snapshot() as connection:
            return bundle_rows.usage(connection)

    def release_bundles(self, ids: Sequence[str]) -> int:
        """Free the bytes of deleted bundles that nobody reads any more; says how many there were."""
        return self._run(lambda change: bundle_rows.release_bundles(change, ids))

    def revision(self) -> int:
        """Number of the last committed transaction."""
        return self._writer.rev

    def changes(self, table: str, run: str | None, after: int) -> tuple[pa.Table, int]:
        """Rows of a metadata table touched after revision ``after``, and the revision that they reach."""
        with self._readers.snapshot() as connection:
            return changes.read_changes(connection, table, run, after)

    def user_columns(self, table: str, run: str | None) -> dict[str, str]:
        """User columns of sessions or segments: name to bool, int, float, text or json."""
        run_id = None if run is None else self._runs.get(run).id
        with self._readers.snapshot() as connection:
            return read_kinds(connection, table, run_id)

    def gauges(self) -> CatalogGauges:
        """Counts, at most ``gauges_ttl_s`` old but for the waiters."""
        known, now_s = self._gauges, time.monotonic()
        if known is not None and now_s - known[0] < self._config.gauges_ttl_s:
            return known[1]
        with self._readers.snapshot() as connection:
            gauges = read_gauges(connection, self._waiters.waiting, self._steps.committed)
        self._gauges = now_s, gauges
        return gauges

    def run_gauges(self, runs: Collection[str]) -> RunGauges:
        """What these runs have open and unclaimed."""
        with self._readers.snapshot() as connection:
            return read_run_gauges(connection, runs)

    def maintain(self) -> None:
        """Expire what time has ended, and checkpoint the log. To be called about once a second."""
        lives = self._config.request_ttl_s, self._config.keep_released_s
        with self._upkeep:
            if self._closed:
                return
            with self._readers.snapshot() as connection:
                due = something_is_due(connection, *lives)
            if due:
                self._run(lambda change: expire_all(change, *lives))
            self.keeping.free_spent()
            checkpoint(self._checkpointer)

    def grant_grace(self) -> None:
        """Claimers that could not renew while the store was closed get half a lease to do so."""
        self._run(leases.grant_grace)

    def close(self) -> None:
        """Finish what is queued and close the file. Idempotent."""
        with self._upkeep:
            if self._closed:
                return
            self._closed = True
            self._checkpointer.close()
        self._waiters.close()
        self._readers.close()
        self._writer.close()

    # -- running operations --------------------------------------------------------------------

    def _run(self, apply: Apply[Result]) -> Result:
        """One operation: its result after commit, or its error raised."""
        (outcome,) = self._writer.run([apply])
        if outcome.released:
            self._on_released(list(outcome.released))
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # type: ignore[return-value]

    def _mutate(self, apply: Apply[Wire]) -> Wire:
        return self._run(apply)

    def _claim_table(self, run: str, claim_id: str) -> bytes:
        record = self._runs.get(run)
        with self._readers.snapshot() as connection:
            return claim_table(connection, record, claim_id)
