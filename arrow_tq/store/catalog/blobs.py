"""Blobs: stored once a run, and kept while any step's reference to them is held.

``blobs.refs`` counts the references (rows of ``step_blobs``) that are held. A reference is held while its
session is open and its step counts; once the session is finalized, ``holds`` counts the pairs of task and
segment on whose path the step is, and the last of them to be done releases it, as it does with chunks.
A blob without references is released with its chunks; its row stays, and comes back to life with new
chunks where the same content is attached again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import apsw

from arrow_tq.store.catalog.blob_plans import PlannedBlob
from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.blobs import BLOB_FIELD, StepBlob
from arrow_tq_schemas.commands import BlobInfo
from arrow_tq_schemas.errors import ChunkLost, ChunkReleased, Conflict
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import StoredChunk

STORED = "stored"
RELEASED = "released"
NO_SESSION = 0
"""As a chunk's session: it is a blob's, which belongs to many."""
_INSERT_CHUNK = (
    "INSERT INTO chunks (chunk_id, session, field, groups, start, rows, bytes, state, holds, created_at, rev,"
    " blob) VALUES (?, ?, ?, 1, ?, ?, ?, 'committed', 0, ?, ?, ?)"
)
_HELD = (
    "SELECT segment_blobs.ref AS ref, count(*) AS n FROM segment_tasks "
    "JOIN segment_blobs ON segment_blobs.segment = segment_tasks.segment WHERE {pairs} "
    "GROUP BY segment_blobs.ref"
)
Unpin = Callable[[apsw.Connection, Sequence[ChunkId]], None]
Brought = Mapping[bytes, PlannedBlob]
"""By id, blobs that the run does not have and a step brings."""


# -- attaching -------------------------------------------------------------------------------------


def check_blobs(
    change: Change, run: int, step_id: str, blobs: Sequence[PlannedBlob], pins: ChunkPins, unpin: Unpin
) -> Brought:
    """Before anything is written: the run has each blob, or the step brings it, whose chunks are pinned.

    Raises:
        ChunkReleased: a blob was released since the writer found it; ``details["blobs"]`` names those, whose
            bytes are to be sent again.
        ChunkLost: a chunk is not there any more.
    """
    if not blobs:
        return {}
    gone: dict[bytes, None] = {}
    brought: dict[bytes, PlannedBlob] = {}
    for blob in blobs:
        row = _stored(change.connection, run, blob.blob_id)
        if row is not None and _is_whole(change.connection, row, pins):
            continue
        if blob.chunks is None:
            gone[blob.blob_id] = None
        else:
            brought.setdefault(blob.blob_id, blob)
    names = [blob_id.hex() for blob_id in gone if blob_id not in brought]
    if names:
        raise ChunkReleased(f"step {step_id!r}: blob {names[0]} is not stored here any more", blobs=names)
    ids = [chunk_id for blob in brought.values() for chunk_id in blob.ids]
    if not ids:
        return brought
    missing = pins.pin(ids)
    if missing:
        lost = [one.hex for one in missing]
        raise ChunkLost(f"step {step_id!r}: no chunk {lost[0]} of its blobs", ids=lost)
    change.undo.append(lambda connection: unpin(connection, ids))
    return brought


def attach_blobs(
    change: Change, run: int, session: int, step: int, blobs: Sequence[PlannedBlob], brought: Brought
) -> None:
    """Write a new step's references, and the blobs that it brought (``check_blobs``)."""
    for blob in brought.values():
        _store(change, run, blob)
    for place, blob in enumerate(blobs):
        row = _stored(change.connection, run, blob.blob_id)
        change.execute("UPDATE blobs SET refs = refs + 1, rev = ? WHERE id = ?", (change.rev, row))
        change.execute(
            "INSERT INTO step_blobs (session, step, place, blob, media_type, state, holds, rev)"
            " VALUES (?, ?, ?, ?, ?, 'held', 0, ?)",
            (session, step, place, row, blob.media_type, change.rev),
        )
    drop_spares(change, blobs)


def drop_spares(change: Change, blobs: Sequence[PlannedBlob]) -> None:
    """Free the chunks of blobs that the run had already, whoever was first."""
    change.released += [
        chunk_id
        for blob in blobs
        for chunk_id in blob.ids
        if change.execute("SELECT 1 FROM chunks WHERE chunk_id = ?", (chunk_id.to_bytes(),)).get is None
    ]


def same_blobs(connection: apsw.Connection, step: int, blobs: Sequence[StepBlob]) -> bool:
    """Whether a committed step has these references."""
    known: Any = connection.execute(
        "SELECT blob_id, step_blobs.media_type FROM step_blobs JOIN blobs ON blobs.id = step_blobs.blob "
        "WHERE step = ? ORDER BY place",
        (step,),
    ).fetchall()
    return [(raw.hex(), name) for raw, name in known] == [(one.blob_id, one.media_type) for one in blobs]


def _stored(connection: apsw.Connection, run: int, blob_id: bytes) -> int | None:
    found: Any = connection.execute(
        "SELECT id, state FROM blobs WHERE run = ? AND blob_id = ?", (run, blob_id)
    ).fetchone()
    return found[0] if found is not None and found[1] == STORED else None


def _is_whole(connection: apsw.Connection, row: int, pins: ChunkPins) -> bool:
    """Whether a stored blob's chunks are there: what was lost comes back where somebody brings it again."""
    return all(pins.holds(ChunkId.from_hex(chunk.id)) for chunk in _chunks(connection, row))


def _chunks(connection: apsw.Connection, row: int) -> list[StoredChunk]:
    rows: Any = connection.execute(
        "SELECT chunk_id, start, rows FROM chunks WHERE blob = ? AND state = 'committed' ORDER BY start",
        (row,),
    )
    return [StoredChunk(id=raw.hex(), start=start, rows=count, bytes=count) for raw, start, count in rows]


def _store(change: Change, run: int, blob: PlannedBlob) -> None:
    row = change.execute(
        "INSERT INTO blobs (run, blob_id, media_type, bytes, state, refs, created_at, rev)"
        " VALUES (?, ?, ?, ?, 'stored', 0, ?, ?)"
        " ON CONFLICT (run, blob_id) DO UPDATE SET state = 'stored', rev = excluded.rev RETURNING id",
        (run, blob.blob_id, blob.media_type, blob.size, change.now_us, change.rev),
    ).get
    _release_chunks(change, row)
    try:
        change.executemany(
            _INSERT_CHUNK,
            [
                (
                    *(chunk_id.to_bytes(), NO_SESSION, BLOB_FIELD.name, start, rows, rows),
                    *(change.now_us, change.rev, row),
                )
                for chunk_id, start, rows in blob.chunks or ()
            ],
        )
    except apsw.ConstraintError:
        raise Conflict(f"blob {blob.blob_id.hex()}: one of its chunks is attached already") from None


def _release_chunks(change: Change, row: int) -> None:
    freed: Any = change.execute(
        "UPDATE chunks SET state = 'released', rev = ? WHERE blob = ? AND state = 'committed' "
        "RETURNING chunk_id",
        (change.rev, row),
    )
    change.released += [ChunkId(int.from_bytes(raw, "big")) for (raw,) in freed]


# -- holding and letting go ------------------------------------------------------------------------


def held_refs(connection: apsw.Connection, session: int) -> dict[str, list[int]]:
    """References of a session that are held, by step id; mostly none."""
    found: dict[str, list[int]] = {}
    rows: Any = connection.execute(
        "SELECT step_id, step_blobs.id FROM step_blobs JOIN steps ON steps.id = step_blobs.step "
        "WHERE step_blobs.session = ? AND state = 'held'",
        (session,),
    )
    for step_id, ref in rows:
        found.setdefault(step_id, []).append(ref)
    return found


def show_blobs(change: Change, segment: int, refs: Sequence[int]) -> None:
    """A new segment shows steps with these references."""
    if refs:
        change.executemany("INSERT INTO segment_blobs VALUES (?, ?)", [(segment, ref) for ref in refs])


def take_blob_holds(change: Change, session: int, view: str) -> None:
    """Count the pairs of task and new segment of this view that keep each reference."""
    pairs = "segment_tasks.segment IN (SELECT id FROM segments WHERE session = ? AND view = ?)"
    change.execute(
        f"UPDATE step_blobs SET holds = holds + counted.n FROM ({_HELD.format(pairs=pairs)}) AS counted "
        "WHERE step_blobs.id = counted.ref",
        (session, view),
    )


def drop_blob_holds(change: Change, pairs: str, values: Sequence[object]) -> None:
    """Give up the holds of pairs that are done, as ``chunk_rows.drop_holds`` does; same arguments."""
    ended = change.execute(
        f"UPDATE step_blobs SET holds = holds - counted.n,"
        " state = CASE WHEN holds > counted.n THEN state ELSE 'released' END,"
        " rev = CASE WHEN holds > counted.n THEN rev ELSE ? END"
        f" FROM ({_HELD.format(pairs=pairs)}) AS counted WHERE step_blobs.id = counted.ref"
        " RETURNING blob, state",
        (change.rev, *values),
    )
    _release(change, [blob for blob, state in ended if state == RELEASED])


def release_unheld_blobs(change: Change, session: int) -> None:
    """End the session's references that no segment keeps."""
    ended: Any = change.execute(
        "UPDATE step_blobs SET state = 'released', rev = ? "
        "WHERE session = ? AND state = 'held' AND holds = 0 RETURNING blob",
        (change.rev, session),
    )
    _release(change, [blob for (blob,) in ended])


def release_blobs_of(change: Change, steps: Sequence[int]) -> None:
    """End the references of steps that are left out."""
    ended: list[int] = []
    for step in steps:
        rows: Any = change.execute(
            "UPDATE step_blobs SET state = 'released', rev = ? "
            "WHERE step = ? AND state = 'held' AND holds = 0 RETURNING blob",
            (change.rev, step),
        )
        ended += [blob for (blob,) in rows]
    _release(change, ended)


def _release(change: Change, blobs: Iterable[int]) -> None:
    """These references (a blob's row for each) ended: free blobs that have none left."""
    for blob, count in Counter(blobs).items():
        state = change.execute(
            "UPDATE blobs SET refs = refs - ?1, rev = ?2,"
            " state = CASE WHEN refs > ?1 THEN state ELSE 'released' END WHERE id = ?3 RETURNING state",
            (count, change.rev, blob),
        ).get
        if state == RELEASED:
            _release_chunks(change, blob)


# -- reading ---------------------------------------------------------------------------------------


def find_blob(connection: apsw.Connection, run: int, blob_id: str, pins: ChunkPins) -> BlobInfo:
    """What the run has of a blob."""
    found: Any = connection.execute(
        "SELECT id, state, media_type, bytes FROM blobs WHERE run = ? AND blob_id = ?",
        (run, bytes.fromhex(blob_id)),
    ).fetchone()
    if found is None:
        return BlobInfo(blob_id=blob_id, state="unknown")
    row, state, media_type, size = found
    if state == STORED and not _is_whole(connection, row, pins):
        state = "lost"
    chunks = _chunks(connection, row) if state == STORED else []
    return BlobInfo(blob_id=blob_id, state=state, media_type=media_type, bytes=size, chunks=chunks)
