"""What can be checked of a step's blobs before the writer sees them: their bytes against their id."""

from __future__ import annotations

from dataclasses import dataclass

from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq_schemas.blobs import BLOB_FIELD, StepBlob
from arrow_tq_schemas.commands import StepCommit
from arrow_tq_schemas.errors import ChunkLost, Conflict, InvalidInput, MalformedMessage, StaleEpoch
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.names import check_media_type
from arrow_tq_schemas.receipts import Receipt

BLOBS_A_STEP_MAX = 4096


@dataclass(frozen=True, slots=True)
class PlannedBlob:
    """One reference, its bytes checked where the step brings them."""

    blob_id: bytes
    media_type: str
    size: int
    chunks: list[tuple[ChunkId, int, int]] | None
    """Id, start and rows of each chunk; None: the run must have the blob."""

    @property
    def ids(self) -> list[ChunkId]:
        return [] if self.chunks is None else [chunk_id for chunk_id, _, _ in self.chunks]


def plan_blobs(commit: StepCommit, bytes_max: int, pins: ChunkPins) -> list[PlannedBlob]:
    """The step's references, in order.

    Raises:
        InvalidInput: too many, one that is too large, or a receipt that is not of this blob.
        MalformedMessage: the bytes do not have the SHA-256 that the blob is named by.
        ChunkLost: a chunk is not there.
        StaleEpoch: the bytes were stored in an older epoch.
    """
    if len(commit.blobs) > BLOBS_A_STEP_MAX:
        raise InvalidInput(f"step {commit.step_id!r}: {len(commit.blobs)} blobs, {BLOBS_A_STEP_MAX} at most")
    return [_plan(commit, blob, bytes_max, pins) for blob in commit.blobs]


def check_size(size: int, bytes_max: int, what: str) -> None:
    """Raises ``InvalidInput`` for more than a blob may have, naming the setting."""
    if size > bytes_max:
        raise InvalidInput(f"{what}: a blob of {size} bytes, blob_bytes_max is {bytes_max}", bytes=size)


def _plan(commit: StepCommit, blob: StepBlob, bytes_max: int, pins: ChunkPins) -> PlannedBlob:
    what = f"step {commit.step_id!r}, blob {blob.blob_id}"
    check_size(blob.bytes, bytes_max, what)
    check_media_type(blob.media_type)
    if blob.receipt is None:
        return PlannedBlob(bytes.fromhex(blob.blob_id), blob.media_type, blob.bytes, None)
    _check_receipt(commit, blob, blob.receipt, what)
    chunks = [(chunk.chunk_id, chunk.start, chunk.rows) for chunk in blob.receipt.chunks]
    for chunk_id, start, rows in chunks:
        header = pins.header(chunk_id)
        if header is None or header.run != commit.run:
            raise ChunkLost(f"{what}: no chunk {chunk_id.hex}", ids=[chunk_id.hex])
        stored = (header.run, header.epoch, header.field, header.start, header.rows)
        if stored != (commit.run, commit.epoch, BLOB_FIELD.name, start, rows):
            raise InvalidInput(f"{what}: chunk {chunk_id.hex} is {stored}, not of this blob")
    seen = pins.sha256([chunk_id for chunk_id, _, _ in chunks])
    if seen != blob.blob_id:
        raise MalformedMessage(f"{what}: its bytes have the SHA-256 {seen}")
    return PlannedBlob(bytes.fromhex(blob.blob_id), blob.media_type, blob.bytes, chunks)


def _check_receipt(commit: StepCommit, blob: StepBlob, receipt: Receipt, what: str) -> None:
    if receipt.epoch != commit.epoch:
        kind = StaleEpoch if receipt.epoch < commit.epoch else Conflict
        raise kind(f"{what}: its bytes are of epoch {receipt.epoch}, the step of epoch {commit.epoch}")
    said = (receipt.run, receipt.field, receipt.start, receipt.rows)
    if said != (commit.run, BLOB_FIELD.name, 0, blob.bytes):
        raise InvalidInput(f"{what}: its receipt is of {said}, expected all of its {blob.bytes} bytes")
    for chunk in receipt.chunks:
        if chunk.chunk_id.group or chunk.groups != 1 or chunk.valid is not None:
            raise InvalidInput(f"{what}: chunk {chunk.id}: expected one layer group without nulls")
