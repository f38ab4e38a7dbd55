"""The SQLite schema, and how an older file becomes the current one.

Every row that a metadata table shows carries ``rev``, the number of the transaction that last touched
it. Rows are never deleted but for replies and empty claims: a change stream needs no tombstones.

A chunk row stands for all its layer groups (its id carries group 0). ``holds`` counts the pairs of
segment and task that keep it alive: it is freed when the last of them is done.
"""

from __future__ import annotations

import apsw

from arrow_tq.store.catalog.bundle_rows import BUNDLES_SQL
from arrow_tq_schemas.errors import Unsupported

_VERSION_1 = """
CREATE TABLE state (one INTEGER PRIMARY KEY CHECK (one = 1), rev INTEGER NOT NULL) STRICT;
INSERT INTO state VALUES (1, 0);

CREATE TABLE runs (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, durability TEXT NOT NULL, epoch INTEGER NOT NULL,
    fields TEXT NOT NULL, tasks TEXT NOT NULL, policy_version TEXT, created_at INTEGER NOT NULL,
    rev INTEGER NOT NULL
) STRICT;
CREATE INDEX runs_rev ON runs (rev);

CREATE TABLE versions (
    run INTEGER NOT NULL, version TEXT NOT NULL, ordinal INTEGER NOT NULL, PRIMARY KEY (run, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE column_kinds (
    run INTEGER NOT NULL, tbl TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL,
    PRIMARY KEY (run, tbl, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE task_sets (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, tasks TEXT NOT NULL, UNIQUE (run, tasks)
) STRICT;
CREATE TABLE holders (
    task_set INTEGER NOT NULL, task TEXT NOT NULL, field TEXT NOT NULL, PRIMARY KEY (task_set, task, field)
) STRICT, WITHOUT ROWID;

CREATE TABLE closed_groups (
    run INTEGER NOT NULL, group_id TEXT NOT NULL, PRIMARY KEY (run, group_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, session_id TEXT NOT NULL, group_id TEXT,
    status TEXT NOT NULL, reason TEXT, task_set INTEGER NOT NULL, steps INTEGER NOT NULL, last_step TEXT,
    columns TEXT NOT NULL, ttl_us INTEGER, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    expires_at INTEGER, rev INTEGER NOT NULL, UNIQUE (run, session_id)
) STRICT;
CREATE INDEX sessions_rev ON sessions (rev);
CREATE INDEX sessions_open ON sessions (id) WHERE status = 'open';
CREATE INDEX sessions_expiring ON sessions (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX sessions_group ON sessions (run, group_id) WHERE group_id IS NOT NULL;

CREATE TABLE steps (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, step_index INTEGER NOT NULL, step_id TEXT NOT NULL,
    parent_id TEXT, messages TEXT NOT NULL, version TEXT, sampled_start INTEGER, sampled_end INTEGER,
    num_tokens INTEGER, rewrite_at INTEGER, receipts BLOB NOT NULL, created_at INTEGER NOT NULL,
    rev INTEGER NOT NULL, UNIQUE (session, step_id)
) STRICT;
CREATE INDEX steps_rev ON steps (rev);

CREATE TABLE chunks (
    id INTEGER PRIMARY KEY, chunk_id BLOB NOT NULL UNIQUE, session INTEGER NOT NULL, field TEXT NOT NULL,
    groups INTEGER NOT NULL, start INTEGER NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL,
    state TEXT NOT NULL, holds INTEGER NOT NULL, created_at INTEGER NOT NULL, rev INTEGER NOT NULL
) STRICT;
CREATE INDEX chunks_rev ON chunks (rev);
CREATE INDEX chunks_session ON chunks (session);

CREATE TABLE finalized (
    session INTEGER NOT NULL, view TEXT NOT NULL, reward REAL, columns TEXT NOT NULL,
    PRIMARY KEY (session, view)
) STRICT, WITHOUT ROWID;

CREATE TABLE segments (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, segment_id TEXT NOT NULL, session INTEGER NOT NULL,
    session_id TEXT NOT NULL, group_id TEXT, view TEXT NOT NULL, segment_index INTEGER NOT NULL,
    segment_count INTEGER NOT NULL, reward REAL, num_tokens INTEGER NOT NULL, loss_tokens INTEGER NOT NULL,
    version_min TEXT, version_max TEXT, oldest_version INTEGER, complete_fields TEXT NOT NULL,
    finish_reason TEXT NOT NULL, status TEXT NOT NULL, reason TEXT, columns TEXT NOT NULL,
    task_set INTEGER NOT NULL, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    rev INTEGER NOT NULL, UNIQUE (run, segment_id)
) STRICT;
CREATE INDEX segments_rev ON segments (rev);
CREATE INDEX segments_session ON segments (session, view, segment_index);
CREATE INDEX segments_group ON segments (run, group_id) WHERE group_id IS NOT NULL;

CREATE TABLE manifests (segment INTEGER PRIMARY KEY, manifest BLOB NOT NULL, rev INTEGER NOT NULL) STRICT;
CREATE INDEX manifests_rev ON manifests (rev);

CREATE TABLE segment_chunks (
    segment INTEGER NOT NULL, chunk INTEGER NOT NULL, PRIMARY KEY (segment, chunk)
) STRICT, WITHOUT ROWID;

CREATE TABLE segment_tasks (
    segment INTEGER NOT NULL, task TEXT NOT NULL, run INTEGER NOT NULL, view TEXT NOT NULL,
    state TEXT NOT NULL, claim INTEGER, PRIMARY KEY (segment, task)
) STRICT, WITHOUT ROWID;
CREATE INDEX segment_tasks_ready ON segment_tasks (run, task, view, segment) WHERE state = 'ready';
CREATE INDEX segment_tasks_claimed ON segment_tasks (claim) WHERE state = 'claimed';

CREATE TABLE claims (
    id INTEGER PRIMARY KEY, claim_id TEXT NOT NULL UNIQUE, run INTEGER NOT NULL, task TEXT NOT NULL,
    view TEXT NOT NULL, segments INTEGER NOT NULL, lease_s REAL NOT NULL, expires_at INTEGER NOT NULL,
    state TEXT NOT NULL, world INTEGER, created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX claims_active ON claims (expires_at) WHERE state = 'active';
CREATE INDEX claims_empty ON claims (expires_at) WHERE segments = 0;
CREATE TABLE claim_segments (
    claim INTEGER NOT NULL, position INTEGER NOT NULL, segment INTEGER NOT NULL, PRIMARY KEY (claim, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE claim_tables (claim INTEGER PRIMARY KEY, ipc BLOB NOT NULL) STRICT;
CREATE TABLE claim_ranks (
    claim INTEGER NOT NULL, rank INTEGER NOT NULL, PRIMARY KEY (claim, rank)
) STRICT, WITHOUT ROWID;

CREATE TABLE requests (
    request_id BLOB PRIMARY KEY, verb TEXT NOT NULL, body TEXT NOT NULL, created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX requests_created ON requests (created_at);

CREATE TABLE discards (reason TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""

_VERSION_2 = """
ALTER TABLE steps ADD COLUMN status TEXT NOT NULL DEFAULT 'committed';
ALTER TABLE steps ADD COLUMN tools_hash TEXT;
ALTER TABLE steps ADD COLUMN retry_of TEXT;
ALTER TABLE steps ADD COLUMN cut TEXT;
UPDATE steps SET cut = 'rewrite' WHERE rewrite_at IS NOT NULL AND parent_id IS NOT NULL;

ALTER TABLE sessions ADD COLUMN fences INTEGER NOT NULL DEFAULT 0;
CREATE TABLE fences (
    session INTEGER NOT NULL, step_id TEXT NOT NULL, superseded_by TEXT NOT NULL,
    PRIMARY KEY (session, step_id)
) STRICT, WITHOUT ROWID;
"""
"""A tree of steps: which are left out, what ends a segment, and attempts whose retry came before them."""

_BLOBS = """
CREATE TABLE blobs (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, blob_id BLOB NOT NULL, media_type TEXT NOT NULL,
    bytes INTEGER NOT NULL, state TEXT NOT NULL, refs INTEGER NOT NULL, created_at INTEGER NOT NULL,
    rev INTEGER NOT NULL, UNIQUE (run, blob_id)
) STRICT;
CREATE INDEX blobs_rev ON blobs (rev);

CREATE TABLE step_blobs (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, step INTEGER NOT NULL, place INTEGER NOT NULL,
    blob INTEGER NOT NULL, media_type TEXT NOT NULL, state TEXT NOT NULL, holds INTEGER NOT NULL,
    rev INTEGER NOT NULL, UNIQUE (step, place)
) STRICT;
CREATE INDEX step_blobs_rev ON step_blobs (rev);
CREATE INDEX step_blobs_session ON step_blobs (session);

CREATE TABLE segment_blobs (
    segment INTEGER NOT NULL, ref INTEGER NOT NULL, PRIMARY KEY (segment, ref)
) STRICT, WITHOUT ROWID;

ALTER TABLE chunks ADD COLUMN blob INTEGER;
CREATE INDEX chunks_blob ON chunks (blob) WHERE blob IS NOT NULL;
"""
"""Files that steps refer to: a chunk belongs to a session, or (session 0) to a blob, which many share."""

_LATE_VALUES = """
CREATE TABLE late_fields (
    run INTEGER NOT NULL, field TEXT NOT NULL, PRIMARY KEY (run, field)
) STRICT, WITHOUT ROWID;
CREATE TABLE late_values (
    segment INTEGER NOT NULL, field TEXT NOT NULL, claim INTEGER NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (segment, field)
) STRICT, WITHOUT ROWID;
"""
"""Fields that were added to a run, and who put which of them for a segment."""

_MARKS = """
ALTER TABLE claims ADD COLUMN rev INTEGER NOT NULL DEFAULT 0;
UPDATE claims SET rev = (SELECT rev FROM state);
CREATE INDEX claims_rev ON claims (rev);
CREATE INDEX claims_run ON claims (run) WHERE state = 'active';
CREATE INDEX claims_ended ON claims (state) WHERE segments > 0;

CREATE TABLE marks (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, mark TEXT NOT NULL, epoch INTEGER NOT NULL,
    policy_version TEXT, status TEXT NOT NULL, reason TEXT, keeps INTEGER NOT NULL,
    kept_segments INTEGER NOT NULL, at_rev INTEGER NOT NULL, created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL, rev INTEGER NOT NULL
) STRICT;
CREATE INDEX marks_rev ON marks (rev);
CREATE UNIQUE INDEX marks_name ON marks (run, mark) WHERE status <> 'rewound';
CREATE INDEX marks_live ON marks (run, id) WHERE status = 'live';

CREATE TABLE kept (
    segment INTEGER NOT NULL, task TEXT NOT NULL, run INTEGER NOT NULL, mark INTEGER NOT NULL,
    kept_at INTEGER NOT NULL, PRIMARY KEY (segment, task)
) STRICT, WITHOUT ROWID;
CREATE INDEX kept_run ON kept (run, mark);
CREATE INDEX kept_at ON kept (kept_at);
"""
"""Checkpoints: marks, and what was released since; claims are shown as a table."""

MIGRATIONS: tuple[str, ...] = (_VERSION_1, _VERSION_2, _BLOBS, _LATE_VALUES, _MARKS, BUNDLES_SQL)
"""Element n takes a file from ``user_version`` n to n + 1. Never edited once released."""


def migrate(connection: apsw.Connection) -> None:
    """Bring the file to the current version, each step in a transaction.

    Raises:
        Unsupported: the file was written by a newer arrow-tq; names both versions.
    """
    version = int(connection.pragma("user_version"))
    if version > len(MIGRATIONS):
        raise Unsupported(
            f"catalog {connection.filename!r} has version {version}, this arrow-tq knows {len(MIGRATIONS)}: "
            "it was written by a newer one",
            version=version,
        )
    for number in range(version, len(MIGRATIONS)):
        with connection:
            connection.execute(MIGRATIONS[number])
            connection.execute(f"PRAGMA user_version = {number + 1}")
