"""Rows of the chunks table: their state, their holds, and what is freed when the last hold goes.

What holds a session's chunks holds its steps' blobs too (``blobs``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import apsw

from arrow_tq.store.catalog.blobs import drop_blob_holds
from arrow_tq.store.catalog.bundle_rows import bundle_chunk_state, count_missing_of_bundles
from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.ids import ChunkId

COMMITTED = "committed"
RELEASED = "released"

_HOLDS = """
    SELECT segment_chunks.chunk AS chunk, count(*) AS n
    FROM segment_tasks
    JOIN segments ON segments.id = segment_tasks.segment
    JOIN segment_chunks ON segment_chunks.segment = segment_tasks.segment
    JOIN chunks AS held ON held.id = segment_chunks.chunk
    JOIN holders ON holders.task_set = segments.task_set
        AND holders.task = segment_tasks.task AND holders.field = held.field
    WHERE {pairs}
    GROUP BY segment_chunks.chunk"""


def take_holds(change: Change, session: int, view: str) -> None:
    """Count, for each chunk, the pairs of task and new segment of this view that keep it alive."""
    pairs = "segment_tasks.segment IN (SELECT id FROM segments WHERE session = ? AND view = ?)"
    change.execute(
        f"UPDATE chunks SET holds = holds + counted.n FROM ({_HOLDS.format(pairs=pairs)}) AS counted "
        "WHERE chunks.id = counted.chunk",
        (session, view),
    )


def take_all_holds(change: Change, session: int, task_set: int) -> None:
    """As ``take_holds``, where one new segment owns every chunk of its session."""
    change.execute(
        "UPDATE chunks SET holds = holds + "
        "(SELECT count(*) FROM holders WHERE task_set = ? AND field = chunks.field) WHERE session = ?",
        (task_set, session),
    )


def take_late_holds(change: Change, segment: int, chunks: Sequence[int]) -> bool:
    """Count the tasks that still have to read chunks which a segment got late; whether there is any.

    One that is done, but kept for a rewind, may have to again.
    """
    pairs = (
        "segment_tasks.segment = ? AND (segment_tasks.state NOT IN ('done', 'discarded') OR EXISTS "
        "(SELECT 1 FROM kept WHERE kept.segment = segment_tasks.segment AND kept.task = segment_tasks.task)) "
        "AND segment_chunks.chunk IN (SELECT value FROM json_each(?))"
    )
    change.execute(
        f"UPDATE chunks SET holds = holds + counted.n FROM ({_HOLDS.format(pairs=pairs)}) AS counted "
        "WHERE chunks.id = counted.chunk",
        (segment, row_list(chunks)),
    )
    return bool(change.connection.changes())


def drop_holds(change: Change, pairs: str, values: Sequence[object]) -> None:
    """Give up the holds of pairs that are done; chunks without any are released.

    Args:
        pairs: SQL condition on ``segment_tasks``.
        values: what its placeholders stand for.
    """
    freed = change.execute(
        f"UPDATE chunks SET holds = holds - counted.n,"
        " state = CASE WHEN holds > counted.n THEN state ELSE 'released' END,"
        " rev = CASE WHEN holds > counted.n THEN rev ELSE ? END"
        f" FROM ({_HOLDS.format(pairs=pairs)}) AS counted WHERE chunks.id = counted.chunk"
        " RETURNING chunk_id, groups, state",
        (change.rev, *values),
    )
    change.released += all_groups((raw, groups) for raw, groups, state in freed if state == RELEASED)
    drop_blob_holds(change, pairs, values)


def release_unheld(change: Change, session: int) -> None:
    """Free the session's chunks that no segment keeps."""
    freed = change.execute(
        "UPDATE chunks SET state = 'released', rev = ? "
        "WHERE session = ? AND state = 'committed' AND holds = 0 RETURNING chunk_id, groups",
        (change.rev, session),
    )
    change.released += all_groups(freed)


def release_chunks(change: Change, ids: Sequence[bytes]) -> None:
    """Free chunks that no segment keeps, by id (group 0)."""
    freed = [
        row
        for chunk_id in ids
        for row in change.execute(
            "UPDATE chunks SET state = 'released', rev = ? "
            "WHERE chunk_id = ? AND state = 'committed' AND holds = 0 RETURNING chunk_id, groups",
            (change.rev, chunk_id),
        )
    ]
    change.released += all_groups(freed)


def all_groups(rows: Iterable[tuple[bytes, int]]) -> list[ChunkId]:
    """Ids of every layer group of these chunks."""
    ids = []
    for raw, groups in rows:
        first = ChunkId(int.from_bytes(raw, "big"))
        ids += [first] if groups == 1 else [first.sibling(group) for group in range(groups)]
    return ids


def read_states(
    connection: apsw.Connection, ids: Sequence[ChunkId], run: int | None = None
) -> list[str | None]:
    """State of each chunk, whichever its layer group.

    None where no step or bundle, or none of ``run``, attached it.
    """
    query = "SELECT state FROM chunks WHERE chunk_id = ?"
    if run is not None:
        query = (
            "SELECT chunks.state FROM chunks LEFT JOIN sessions ON sessions.id = chunks.session "
            "LEFT JOIN blobs ON blobs.id = chunks.blob "
            f"WHERE chunk_id = ? AND {int(run)} IN (sessions.run, blobs.run)"
        )
    states = [connection.execute(query, (chunk_id.sibling(0).to_bytes(),)).get for chunk_id in ids]
    return [
        bundle_chunk_state(connection, chunk_id, run) if state is None else state
        for chunk_id, state in zip(ids, states, strict=True)
    ]


def count_missing(connection: apsw.Connection, here: Collection[ChunkId], shard: int) -> tuple[int, int]:
    """Committed chunks of a shard that are not ``here``, by layer group, and their bytes (groups alike)."""
    chunks, size = count_missing_of_bundles(connection, here, shard)
    for raw, groups, total in connection.execute(
        "SELECT chunk_id, groups, bytes FROM chunks WHERE state = 'committed'"
    ):
        ids = all_groups([(raw, groups)])
        missing = sum(one not in here for one in ids) if ids[0].shard == shard else 0
        chunks += missing
        size += total * missing // groups
    return chunks, size
