"""Rows of the bundles table: published in one transaction, deleted in two steps.

A bundle's chunks are not listed: their ids count up from the bundle's own, so one row says which they are.
Deleting takes the bundle out of sight at once (``deleting``); its chunks are released when the leases of its
readers, which the engine holds, are gone (``deleted``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import apsw

from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.bundles import SCHEME, chunk_id
from arrow_tq_schemas.commands import CommitBundle, DeleteBundle, Done
from arrow_tq_schemas.errors import ChunkLost, Conflict, NotFound
from arrow_tq_schemas.ids import ChunkId

if TYPE_CHECKING:
    from arrow_tq.store.catalog.runs import RunRecord

READY, DELETING, DELETED = "ready", "deleting", "deleted"
BUNDLES_SQL = """
CREATE TABLE bundles (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, first_chunk BLOB NOT NULL UNIQUE, last_chunk BLOB NOT NULL,
    bundle_id TEXT NOT NULL, state TEXT NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL,
    chunks INTEGER NOT NULL, fields TEXT NOT NULL, metadata TEXT NOT NULL, created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL, rev INTEGER NOT NULL
) STRICT;
CREATE INDEX bundles_rev ON bundles (rev);
CREATE INDEX bundles_run ON bundles (run, state);
CREATE INDEX bundles_deleting ON bundles (id) WHERE state = 'deleting';
"""
BUNDLE_COLUMNS: Mapping[str, str] = {
    "run": "runs.run",
    "ref": f"'{SCHEME}:' || runs.run || ':' || bundles.bundle_id",
}
"""Columns of the SQL table that are not columns of ours."""
RELEASED_MAX = 256
"""Bundles released in one transaction at most."""


@dataclass(frozen=True, slots=True)
class BundleRow:
    """A published bundle."""

    bundle_id: str
    rows: int
    bytes: int
    chunks: int
    metadata: str


def commit_bundle(change: Change, run: RunRecord, command: CommitBundle, pins: ChunkPins) -> Done:
    """Publish a bundle.

    Raises:
        StaleEpoch: the writer joined an older epoch.
        ChunkLost: not all of its chunks are stored (any more); nothing is published.
        Conflict: a bundle of that id is there.
    """
    run.check_epoch(command.epoch)
    ids = _ids(command.bundle_id, command.chunks)
    known = bundle_chunk_state(change.connection, ids[0])
    if known is not None or bundle_chunk_state(change.connection, ids[-1]) is not None:
        raise Conflict(f"bundle {command.bundle_id}: chunks of that id are in use", id=command.bundle_id)
    missing = pins.pin(ids)
    if missing:
        raise ChunkLost(
            f"bundle {command.bundle_id}: {len(missing)} of {len(ids)} chunks are not stored here",
            ids=[one.hex for one in missing[:16]],
        )
    change.undo.append(lambda _: pins.unpin(ids))
    change.execute(
        "INSERT INTO bundles (run, first_chunk, last_chunk, bundle_id, state, rows, bytes, chunks, fields,"
        " metadata, created_at, updated_at, rev) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(run.id, ids[0].to_bytes(), ids[-1].to_bytes(), command.bundle_id, READY, command.rows),
            *(command.bytes, command.chunks, json.dumps(command.fields), command.metadata),
            *(change.now_us, change.now_us, change.rev),
        ),
    )
    return Done(count=1)


def delete_bundle(change: Change, run: RunRecord, command: DeleteBundle) -> Done:
    """Take a bundle out of sight; raises ``NotFound`` where the run never had it."""
    state = change.execute(
        "SELECT state FROM bundles WHERE run = ? AND first_chunk = ?",
        (run.id, bytes.fromhex(command.bundle_id)),
    ).get
    if state is None:
        raise not_found(run.name, command.bundle_id)
    if state == READY:
        change.execute(
            "UPDATE bundles SET state = ?, updated_at = ?, rev = ? WHERE first_chunk = ?",
            (DELETING, change.now_us, change.rev, bytes.fromhex(command.bundle_id)),
        )
    return Done()


def release_bundles(change: Change, ids: Sequence[str]) -> int:
    """Free the chunks of bundles that are being deleted; the row stays as their tombstone."""
    released = 0
    for bundle_id in ids[:RELEASED_MAX]:
        count = change.execute(
            "UPDATE bundles SET state = ?, updated_at = ?, rev = ? WHERE first_chunk = ? AND state = ?"
            " RETURNING chunks",
            (DELETED, change.now_us, change.rev, bytes.fromhex(bundle_id), DELETING),
        ).get
        if count is not None:
            change.released += _ids(bundle_id, count)
            released += 1
    return released


def find_ready(connection: apsw.Connection, run: RunRecord, bundle_id: str) -> BundleRow:
    """Raises ``NotFound``, saying so where the bundle was deleted."""
    row: Any = connection.execute(
        "SELECT state, rows, bytes, chunks, metadata FROM bundles WHERE run = ? AND first_chunk = ?",
        (run.id, bytes.fromhex(bundle_id)),
    ).fetchone()
    if row is None:
        raise not_found(run.name, bundle_id)
    state, rows, size, chunks, metadata = row
    if state != READY:
        raise NotFound(f"bundle {bundle_id} of run {run.name!r} was deleted", id=bundle_id, run=run.name)
    return BundleRow(bundle_id, rows, size, chunks, metadata)


def find_run(connection: apsw.Connection, bundle_id: str) -> str:
    """The run of a bundle; raises ``NotFound``."""
    run: str | None = connection.execute(
        "SELECT runs.run FROM bundles JOIN runs ON runs.id = bundles.run WHERE first_chunk = ?",
        (bytes.fromhex(bundle_id),),
    ).get
    if run is None:
        raise NotFound(f"there is no bundle {bundle_id}", id=bundle_id)
    return run


def find_deleting(connection: apsw.Connection) -> list[str]:
    """Ids of bundles whose bytes wait for readers, the oldest first, at most ``RELEASED_MAX``."""
    rows: Any = connection.execute(
        "SELECT bundle_id FROM bundles WHERE state = 'deleting' ORDER BY id LIMIT ?", (RELEASED_MAX,)
    )
    return [bundle_id for (bundle_id,) in rows]


def usage(connection: apsw.Connection) -> dict[str, tuple[int, int]]:
    """By run, how many bundles still have bytes, and how many bytes."""
    rows: Any = connection.execute(
        "SELECT runs.run, count(*), sum(bytes) FROM bundles JOIN runs ON runs.id = bundles.run "
        "WHERE state IN ('ready', 'deleting') GROUP BY runs.run"
    )
    return {run: (count, size) for run, count, size in rows}


def bundle_chunk_state(connection: apsw.Connection, one: ChunkId, run: int | None = None) -> str | None:
    """``committed`` or ``released`` for a chunk of a bundle (of the run), else None."""
    raw = one.to_bytes()
    row: Any = connection.execute(
        "SELECT last_chunk, state, run FROM bundles WHERE first_chunk <= ? ORDER BY first_chunk DESC LIMIT 1",
        (raw,),
    ).fetchone()
    if row is None or raw > row[0] or (run is not None and row[2] != run):
        return None
    return "released" if row[1] == DELETED else "committed"


def count_missing_of_bundles(
    connection: apsw.Connection, here: Collection[ChunkId], shard: int
) -> tuple[int, int]:
    """A shard's chunks of published bundles that are not ``here``, and their bytes (chunks as if alike)."""
    chunks = size = 0
    rows: Any = connection.execute("SELECT bundle_id, chunks, bytes FROM bundles WHERE state = 'ready'")
    for bundle_id, count, total in rows:
        if ChunkId.from_hex(bundle_id).shard != shard:
            continue
        missing = sum(one not in here for one in _ids(bundle_id, count))
        chunks += missing
        size += total * missing // count
    return chunks, size


def not_found(run: str, bundle_id: str) -> NotFound:
    """The error for a bundle that readers cannot find."""
    return NotFound(f"run {run!r} has no bundle {bundle_id}", id=bundle_id, run=run)


def _ids(bundle_id: str, count: int) -> list[ChunkId]:
    return [chunk_id(bundle_id, index) for index in range(count)]
