"""Arrow schemas of the metadata tables, as SQL and ``batch.table`` show them.

Columns that users pass (``session(..., lr=0.1)``, ``finalize(...)``, ``update(...)``) follow these as
further columns, typed by their values. Times are UTC microseconds.
"""

from __future__ import annotations

import pyarrow as pa

_TEXT, _INT, _REAL, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_TIME = pa.timestamp("us", tz="UTC")
_NAMES = pa.list_(pa.string())

RUNS = pa.schema(
    [
        ("run", _TEXT),
        ("durability", _TEXT),
        ("epoch", _INT),
        ("fields", _TEXT),
        ("tasks", _TEXT),
        ("policy_version", _TEXT),
        ("created_at", _TIME),
    ]
)
"""fields and tasks are their JSON declarations; policy_version is the newest that was set."""

SESSIONS = pa.schema(
    [
        ("run", _TEXT),
        ("session_id", _TEXT),
        ("group_id", _TEXT),
        ("status", _TEXT),
        ("reason", _TEXT),
        ("tasks", _NAMES),
        ("steps", _INT),
        ("created_at", _TIME),
        ("updated_at", _TIME),
        ("expires_at", _TIME),
    ]
)
"""status: open, finalized, aborted, discarded or expired; reason says why it ended."""

STEPS = pa.schema(
    [
        ("run", _TEXT),
        ("session_id", _TEXT),
        ("step_id", _TEXT),
        ("parent_id", _TEXT),
        ("step_index", _INT),
        ("messages", _TEXT),
        ("version", _TEXT),
        ("sampled_start", _INT),
        ("sampled_end", _INT),
        ("num_tokens", _INT),
        ("rewrite_at", _INT),
        ("status", _TEXT),
        ("created_at", _TIME),
        ("tools_hash", _TEXT),
        ("retry_of", _TEXT),
        ("cut", _TEXT),
    ]
)
"""messages: the step's new messages as a JSON array; num_tokens: end position of its ``all`` fields;
rewrite_at: first position whose token ids differ from its path before, if any; status: committed,
abandoned, or superseded (by the retry whose ``retry_of`` names it); cut: why its parent's segment ends
before it (rewrite, mismatch, tools), if it does."""

SEGMENTS = pa.schema(
    [
        ("run", _TEXT),
        ("segment_id", _TEXT),
        ("session_id", _TEXT),
        ("group_id", _TEXT),
        ("view", _TEXT),
        ("segment_index", _INT),
        ("segment_count", _INT),
        ("reward", _REAL),
        ("num_tokens", _INT),
        ("loss_tokens", _INT),
        ("version_min", _TEXT),
        ("version_max", _TEXT),
        ("complete_fields", _NAMES),
        ("finish_reason", _TEXT),
        ("status", _TEXT),
        ("reason", _TEXT),
        ("created_at", _TIME),
        ("updated_at", _TIME),
    ]
)
"""status: ready, claimed (by some task), done (for every task), or discarded; finish_reason: why the
segment ends where it does: ``end`` (of its path), ``rewrite`` (other token ids follow), ``mismatch``
(likewise, though the messages only grew), ``tools`` (other tools), ``branch`` (timeline: another branch
went on); version_min, version_max: of the steps whose loss it carries; reason: why it was discarded, or
done without having been claimed."""

SPANS = pa.schema(
    [
        ("run", _TEXT),
        ("segment_id", _TEXT),
        ("field", _TEXT),
        ("start", _INT),
        ("rows", _INT),
        ("chunk_id", _TEXT),
        ("first_row", _INT),
    ]
)

CHUNKS = pa.schema(
    [
        ("chunk_id", _TEXT),
        ("run", _TEXT),
        ("session_id", _TEXT),
        ("field", _TEXT),
        ("layer_group", _INT),
        ("shard", _INT),
        ("start", _INT),
        ("rows", _INT),
        ("bytes", _INT),
        ("state", _TEXT),
        ("created_at", _TIME),
    ]
)
"""state: committed or released. Chunks that no step attached yet are only in their shard's index.
One row a chunk and layer group. Those of blobs have the field ``_blobs`` and no session."""

BLOBS = pa.schema(
    [
        ("run", _TEXT),
        ("blob_id", _TEXT),
        ("media_type", _TEXT),
        ("bytes", _INT),
        ("refs", _INT),
        ("state", _TEXT),
        ("created_at", _TIME),
    ]
)
"""Files that agents saw, each stored once; blob_id: SHA-256 of the content; media_type: as it was attached
first; refs: references of steps that are not released; state: stored, or released with the last of them."""

STEP_BLOBS = pa.schema(
    [
        ("run", _TEXT),
        ("session_id", _TEXT),
        ("step_id", _TEXT),
        ("place", _INT),
        ("blob_id", _TEXT),
        ("media_type", _TEXT),
        ("state", _TEXT),
    ]
)
"""Which steps refer to which blobs, in the order of attaching (place 0, 1, ...); state: held or released."""

CLAIMS = pa.schema(
    [
        ("claim_id", _TEXT),
        ("run", _TEXT),
        ("task", _TEXT),
        ("view", _TEXT),
        ("segments", _INT),
        ("state", _TEXT),
        ("world", _INT),
        ("released_ranks", _INT),
        ("lease_s", _REAL),
        ("expires_at", _TIME),
        ("created_at", _TIME),
    ]
)
"""state: active (under its lease until expires_at), done, expired, or rewound; world: ranks that share it,
null before one attached. Claims that took nothing are not shown."""

MARKS = pa.schema(
    [
        ("run", _TEXT),
        ("mark", _TEXT),
        ("epoch", _INT),
        ("policy_version", _TEXT),
        ("status", _TEXT),
        ("reason", _TEXT),
        ("kept_segments", _INT),
        ("created_at", _TIME),
        ("updated_at", _TIME),
    ]
)
"""status: live (the run can be rewound to it), spent (what was released since is freed; reason says why) or
rewound (the run went back to an earlier one; its name is free again); kept_segments: pairs of segment and
task that were released under it and are kept."""

BUNDLES = pa.schema(
    [
        ("run", _TEXT),
        ("bundle_id", _TEXT),
        ("ref", _TEXT),
        ("state", _TEXT),
        ("rows", _INT),
        ("bytes", _INT),
        ("chunks", _INT),
        ("fields", _NAMES),
        ("metadata", _TEXT),
        ("created_at", _TIME),
        ("updated_at", _TIME),
    ]
)
"""state: ready, deleting (its bytes wait for readers' leases) or deleted; metadata: JSON text."""

TABLES: dict[str, pa.Schema] = {
    "runs": RUNS,
    "sessions": SESSIONS,
    "steps": STEPS,
    "segments": SEGMENTS,
    "spans": SPANS,
    "chunks": CHUNKS,
    "blobs": BLOBS,
    "step_blobs": STEP_BLOBS,
    "claims": CLAIMS,
    "marks": MARKS,
    "bundles": BUNDLES,
}

_WITH_COLUMNS = (RUNS, SESSIONS, STEPS, SEGMENTS, SPANS, CHUNKS)
RESERVED_COLUMNS = frozenset(name for schema in _WITH_COLUMNS for name in schema.names)
"""Names that a user's own column cannot take (``reward`` has a parameter of its own). Tables that came later
have no user columns, and must not take names away from those that exist."""
