"""Values that a trainer puts for segments of its claim: shown in the manifest, once they are whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import apsw
import numpy as np
import numpy.typing as npt

from arrow_tq.intervals import domain_ranges, gaps, overlay, restrict
from arrow_tq.store.catalog.chunk_rows import COMMITTED, all_groups, take_late_holds
from arrow_tq.store.catalog.claims import ACTIVE, ClaimRow, get_claim
from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq.store.catalog.database import row_list
from arrow_tq.store.catalog.runs import RunRecord, WriterRuns
from arrow_tq.store.catalog.segments import GONE
from arrow_tq.store.catalog.step_plans import ChunkRow, check_receipt, lost
from arrow_tq.store.catalog.writer import Again, Change
from arrow_tq.store.receipt_spans import owned_ids, valid_runs, whole_spans
from arrow_tq_schemas.commands import Done, LateValue, PutValues
from arrow_tq_schemas.errors import ChunkReleased, Conflict, Hole, InvalidInput, NotFound
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import OWNED_DTYPE, Manifest
from arrow_tq_schemas.spans import Spans, empty_spans

VALUES_MAX = 1 << 16
_INSERT_CHUNK = (
    "INSERT INTO chunks (chunk_id, field, groups, start, rows, bytes, session, state, holds, created_at, rev)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, 'committed', 0, ?, ?)"
)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedValue:
    """One segment's value, composed from its manifest of revision ``rev``."""

    segment: int
    session: int
    name: str
    rev: int
    manifest: bytes
    chunks: list[ChunkRow]
    ids: list[ChunkId]
    """All layer groups."""
    replaced: list[bytes]
    """Chunks (group 0) of the value that was there before."""
    same: bool
    """The segment shows just these chunks already."""


def prepare_values(
    connection: apsw.Connection, run: RunRecord, command: PutValues, pins: ChunkPins
) -> list[PreparedValue]:
    """Check the values against one snapshot, and compose the manifests that show them.

    Raises:
        NotFound: field or segment.
        ChunkReleased: the segment is done or discarded.
        ChunkLost, InvalidInput, StaleEpoch: receipts that do not fit field or chunks.
        Hole: a value that does not cover its field's domain; names the positions.
    """
    field = run.field(command.field)
    if len(command.values) > VALUES_MAX:
        raise InvalidInput(f"{len(command.values)} values: at most {VALUES_MAX}")
    names = [value.segment_id for value in command.values]
    if len(set(names)) != len(names):
        raise InvalidInput(f"field {field.name!r}: two values for one segment")
    return [_prepare(connection, run, field, command, value, pins) for value in command.values]


def store_values(
    prepared: Sequence[PreparedValue], runs: WriterRuns, command: PutValues, pins: ChunkPins
) -> Callable[[Change], Done]:
    """The operation that shows all of the values, or none; it counts the segments that changed.

    Raises:
        ClaimGone: the claim is over.
        Conflict: a segment is not in the claim, or has values that are not to be replaced.
        ChunkReleased: every task that reads the field is done with a segment.
        Again: a segment changed since the values were prepared.
    """

    def apply(change: Change) -> Done:
        run = runs.get(change, command.run)
        run.check_epoch(command.epoch)
        field = run.field(command.field)
        claim = get_claim(change, run, command.claim_id)
        changed = [value for value in prepared if not value.same]
        for value in prepared:
            _check_claimed(change, claim, value)
        for value in changed:
            _show(change, run, field, claim, command.epoch, value, pins)
        change.wakes = bool(changed)
        return Done(count=len(changed))

    return apply


def _prepare(
    connection: apsw.Connection,
    run: RunRecord,
    field: Field,
    command: PutValues,
    value: LateValue,
    pins: ChunkPins,
) -> PreparedValue:
    found: Any = connection.execute(
        "SELECT segments.id, session, status, reason, manifest, manifests.rev FROM segments "
        "JOIN manifests ON segment = segments.id WHERE run = ? AND segment_id = ?",
        (run.id, value.segment_id),
    ).fetchone()
    if found is None:
        raise NotFound(f"run {run.name!r} has no segment {value.segment_id!r}", id=value.segment_id)
    segment, session, status, reason, raw, rev = found
    if status in GONE:
        because = f" ({reason})" if reason else ""
        raise ChunkReleased(
            f"segment {value.segment_id!r} is {status}{because}: nothing is put there",
            segment_id=value.segment_id,
        )
    chunks: list[ChunkRow] = []
    ids: list[ChunkId] = []
    what = f"segment {value.segment_id!r}"
    for receipt in value.receipts:
        if receipt.field != field.name:
            raise InvalidInput(f"{what}: a receipt of field {receipt.field!r}, not {field.name!r}")
        check_receipt(run, command.epoch, what, receipt, pins, chunks, ids)
    manifest = Manifest.decode(raw)
    stored = [chunk for receipt in value.receipts for chunk in receipt.chunks]
    whole = whole_spans(stored)
    shown = _shown(field, manifest, valid_runs(whole, stored))
    before = manifest.spans.get(field.name, empty_spans())
    old, new = owned_ids([before]), owned_ids([whole])
    if len(before) and not _is_late(connection, segment, field.name):
        raise Conflict(
            f"segment {value.segment_id!r} has rows of field {field.name!r} from its rollout: "
            "they are not replaced",
            segment_id=value.segment_id,
            field=field.name,
        )
    # What it showed of late values, it owned; nothing else of the segment has those chunks.
    owned = np.unique(np.concatenate([np.setdiff1d(manifest.owned, old), new]))
    composed = replace(manifest, spans={**manifest.spans, field.name: shown}, owned=owned)
    same = np.array_equal(old, new)
    return PreparedValue(
        *(segment, session, value.segment_id, rev, b"" if same else composed.encode(), chunks, ids),
        [] if same else _keys(old),
        same,
    )


def _shown(field: Field, manifest: Manifest, spans: Spans) -> Spans:
    """The value's spans inside the field's domain, which they must cover."""
    domain = domain_ranges(field, manifest.num_tokens, manifest.sampled)
    shown = restrict(overlay(spans, field.overlay), domain)
    missing = gaps(shown, domain)
    if len(missing):
        start, end = missing[0].tolist()
        raise Hole(
            f"segment {manifest.segment_id!r}, field {field.name!r}: the value has no rows for positions "
            f"{start}..{end - 1}{' and others' if len(missing) > 1 else ''}: a segment's value is put whole",
            segment_id=manifest.segment_id,
            field=field.name,
            positions=missing.reshape(-1).tolist()[:8],
        )
    return shown


def _check_claimed(change: Change, claim: ClaimRow, value: PreparedValue) -> None:
    held = change.execute(
        "SELECT 1 FROM segment_tasks WHERE segment = ? AND claim = ? AND state = 'claimed'",
        (value.segment, claim.id),
    ).get
    if held is None:
        raise Conflict(
            f"segment {value.name!r} is not claimed by claim {claim.claim_id}: values are put by whoever "
            "holds it",
            segment_id=value.name,
        )


def _show(
    change: Change,
    run: RunRecord,
    field: Field,
    claim: ClaimRow,
    epoch: int,
    value: PreparedValue,
    pins: ChunkPins,
) -> None:
    _check_replaceable(change, field, epoch, value)
    missing = pins.pin(value.ids)
    if missing:
        raise lost(f"segment {value.name!r}", missing)
    change.undo.append(lambda connection: _unpin(connection, value, pins))
    change.execute(
        "UPDATE manifests SET manifest = ?, rev = ? WHERE segment = ? AND rev = ?",
        (value.manifest, change.rev, value.segment, value.rev),
    )
    if not change.connection.changes():
        raise Again(f"segment {value.name!r} changed while a value was put")
    _give_up(change, value)
    _attach(change, field, value)
    text = change.execute("SELECT complete_fields FROM segments WHERE id = ?", (value.segment,)).get
    complete = {*json.loads(text), field.name}
    change.execute(
        "UPDATE segments SET complete_fields = ?, updated_at = ?, rev = ? WHERE id = ?",
        (
            *(json.dumps([name for name in run.fields if name in complete]), change.now_us, change.rev),
            value.segment,
        ),
    )
    change.execute(
        "INSERT OR REPLACE INTO late_values VALUES (?, ?, ?, ?)",
        (value.segment, field.name, claim.id, epoch),
    )


def _check_replaceable(change: Change, field: Field, epoch: int, value: PreparedValue) -> None:
    """Values stay, unless whoever put them was cut off: its lease ran out, or its epoch is over."""
    found: Any = change.execute(
        "SELECT epoch, claims.claim_id, claims.state, claims.expires_at FROM late_values "
        "JOIN claims ON claims.id = late_values.claim WHERE segment = ? AND field = ?",
        (value.segment, field.name),
    ).fetchone()
    if found is None:
        return
    before, claim_id, state, expires_at = found
    alive = state == "done" or (state == ACTIVE and expires_at > change.now_us)
    if before == epoch and alive:
        raise Conflict(
            f"segment {value.name!r} has other values of field {field.name!r}, put by claim {claim_id}, "
            f"which is {state}: they are not replaced",
            segment_id=value.name,
            field=field.name,
            claim_id=claim_id,
        )


def _give_up(change: Change, value: PreparedValue) -> None:
    """Release the chunks of the value that was there before."""
    for chunk_id in value.replaced:
        rows: Any = change.execute(
            "UPDATE chunks SET state = 'released', holds = 0, rev = ? "
            "WHERE chunk_id = ? AND state = 'committed' RETURNING id, chunk_id, groups",
            (change.rev, chunk_id),
        ).fetchall()
        change.released += all_groups((raw, groups) for _, raw, groups in rows)
        change.execute(
            "DELETE FROM segment_chunks WHERE segment = ? AND chunk IN (SELECT value FROM json_each(?))",
            (value.segment, row_list([row for row, _, _ in rows])),
        )


def _attach(change: Change, field: Field, value: PreparedValue) -> None:
    """The chunks belong to the segment, and are held by the tasks that still have to read them."""
    rows = []
    for chunk in value.chunks:
        try:
            change.execute(_INSERT_CHUNK, (*chunk, value.session, change.now_us, change.rev))
        except apsw.ConstraintError:
            raise Conflict(
                f"segment {value.name!r}: chunk {chunk[0].hex()} is attached already, or was released",
                chunk_id=chunk[0].hex(),
            ) from None
        rows.append(change.connection.last_insert_rowid())
    change.executemany("INSERT INTO segment_chunks VALUES (?, ?)", [(value.segment, row) for row in rows])
    if rows and not take_late_holds(change, value.segment, rows):
        raise ChunkReleased(
            f"segment {value.name!r}: every task that reads field {field.name!r} is done with it",
            segment_id=value.name,
            field=field.name,
        )


def _unpin(connection: apsw.Connection, value: PreparedValue, pins: ChunkPins) -> None:
    """Take the marks back, but for chunks that are attached after all."""
    query = "SELECT state FROM chunks WHERE chunk_id = ?"
    free = {row[0] for row in value.chunks if connection.execute(query, (row[0],)).get != COMMITTED}
    pins.unpin([one for one in value.ids if one.sibling(0).to_bytes() in free])


def _is_late(connection: apsw.Connection, segment: int, field: str) -> bool:
    query = "SELECT 1 FROM late_values WHERE segment = ? AND field = ?"
    return connection.execute(query, (segment, field)).get is not None


def _keys(ids: npt.NDArray[np.void]) -> list[bytes]:
    assert ids.dtype == OWNED_DTYPE
    raw = np.stack([ids["high"], ids["low"]], axis=1).astype(">u8").tobytes()
    return [raw[place : place + 16] for place in range(0, len(raw), 16)]
