"""What each command that changes the catalog does in its writer."""

from __future__ import annotations

from collections.abc import Callable

from arrow_tq.store.catalog import (
    bundle_rows,
    discards,
    late_fields,
    leases,
    marks,
    runs as run_rows,
    segments,
    sessions,
    tree,
)
from arrow_tq.store.catalog.columns import read_kinds
from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq.store.catalog.database import Readers
from arrow_tq.store.catalog.runs import CommittedRuns, WriterRuns
from arrow_tq.store.catalog.writer import Apply
from arrow_tq_schemas.commands import (
    AbandonStep,
    AbortSession,
    AddField,
    AttachClaim,
    CloseGroup,
    CommitBundle,
    DeleteBundle,
    Discard,
    Mark,
    Mutation,
    OpenBundleRun,
    OpenRun,
    OpenSession,
    ReleaseClaim,
    RenewClaim,
    Rewind,
    SetPolicyVersion,
    UpdateSegments,
    Wire,
)
from arrow_tq_schemas.errors import Unsupported


class Operations:
    """Commands whose whole work is one transaction, as operations for the writer.

    Args:
        readers: for what is looked up before the transaction.
        committed: runs as readers see them.
        runs: runs as the writer sees them.
        pins: which chunks are stored.
        keep_marks: how many marks of a run keep what was released.
    """

    def __init__(
        self,
        readers: Readers,
        committed: CommittedRuns,
        runs: WriterRuns,
        pins: ChunkPins,
        keep_marks: int,
    ) -> None:
        self._readers = readers
        self._committed = committed
        self._runs = runs
        self._pins = pins
        self._keep_marks = keep_marks
        self.created: Callable[[str, str], None] = lambda run, session_id: None
        """Told of each new session, in the writer, once it is committed."""

    def operation(self, command: Mutation) -> Apply[Wire]:
        """What a command does in the writer; raises ``Unsupported`` for one that is not of the catalog."""
        runs = self._runs
        if isinstance(command, OpenRun):
            return lambda change: run_rows.open_run(change, runs, self._committed, command)
        if isinstance(command, AddField):
            return lambda change: late_fields.add_field(change, runs, self._committed, command)
        if isinstance(command, OpenBundleRun):
            return lambda change: run_rows.open_bundle_run(change, runs, self._committed, command)
        if isinstance(command, CommitBundle):
            return lambda change: bundle_rows.commit_bundle(
                change, runs.get(change, command.run), command, self._pins
            )
        if isinstance(command, DeleteBundle):
            return lambda change: bundle_rows.delete_bundle(change, runs.get(change, command.run), command)
        if isinstance(command, SetPolicyVersion):
            return lambda change: run_rows.set_policy_version(change, runs, self._committed, command)
        if isinstance(command, OpenSession):
            return lambda change: sessions.open_session(change, runs, command, self.created)
        if isinstance(command, CloseGroup):
            return lambda change: sessions.close_group(change, runs, command)
        if isinstance(command, AbandonStep):
            return lambda change: tree.abandon_step(change, runs, command)
        if isinstance(command, AbortSession):
            return lambda change: discards.abort_session(change, runs, command)
        if isinstance(command, AttachClaim):
            return lambda change: leases.attach(change, runs, command)
        if isinstance(command, RenewClaim):
            return lambda change: leases.renew(change, runs, command)
        if isinstance(command, ReleaseClaim):
            return lambda change: leases.release(change, runs, command)
        if isinstance(command, UpdateSegments):
            return lambda change: segments.update_segments(change, runs, command)
        if isinstance(command, Mark):
            return lambda change: marks.mark(change, runs, command, self._keep_marks)
        if isinstance(command, Rewind):
            return lambda change: marks.rewind(change, runs, self._committed, command)
        if isinstance(command, Discard):
            clause = self._clause(command.run, command.where)
            return lambda change: discards.discard(change, runs, command, clause)
        raise Unsupported(f"the catalog does not answer {command.verb!r}")

    def _clause(self, run: str, where: str | None) -> segments.Clause:
        run_id = self._committed.get(run).id
        with self._readers.snapshot() as connection:
            return segments.where_sql(where, read_kinds(connection, "segments", run_id))
