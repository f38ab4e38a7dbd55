"""``batch.put``: values that a trainer made, stored as chunks and shown in their segments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash

from arrow_tq.calls import ask
from arrow_tq.intervals import domain_ranges
from arrow_tq.producer.arrays import as_source
from arrow_tq.producer.encode import encode
from arrow_tq_schemas.commands import Done, DropChunks, LateValue, PutValues
from arrow_tq_schemas.errors import ArrowTQError, RowCountMismatch
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import RANDOM_BITS, SHARD_MAX, ChunkId
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.receipts import Receipt, chunk_ids

if TYPE_CHECKING:
    from arrow_tq.backend import PutHandle
    from arrow_tq.runs import Run

SEGMENTS_PER_CALL = 256
BYTES_PER_CALL = 256 << 20
CLEAN_UP_S = 10.0
"""How long a failed put waits for what is under way before it frees it."""
Piece = tuple[int, Any]
"""First position, and the rows from it on."""


class ContentIds:
    """Chunk ids that follow from what is put: the same values again have the same ids: stored once."""

    def __init__(self, digest: bytes, time_ms: int) -> None:
        self._random = int.from_bytes(digest[:8], "big") >> 64 - RANDOM_BITS
        self._time_ms = time_ms

    def next(self, shard: int) -> ChunkId:
        random = self._random
        self._random = (random + 1) % (1 << RANDOM_BITS)
        return ChunkId.make(self._time_ms, shard, 0, random)


def put_values(run: Run, claim_id: str, field: Field, manifests: Sequence[Manifest], arrays: object) -> int:
    """Store one array a segment and show them; says how many segments changed. See ``Batch.put``."""
    values = _per_segment(field, manifests, arrays)
    # All are looked at before any is stored.
    pieces = [_pieces(field, manifest, value) for manifest, value in zip(manifests, values, strict=True)]
    changed, group = 0, _Group(run, claim_id, field)
    for manifest, parts in zip(manifests, pieces, strict=True):
        group.add(manifest, parts)
        if group.is_full:
            changed += group.show()
            group = _Group(run, claim_id, field)
    return changed + group.show()


class _Group:
    """Segments whose values are shown together."""

    def __init__(self, run: Run, claim_id: str, field: Field) -> None:
        self._run, self._claim_id, self._field = run, claim_id, field
        self._late: list[LateValue] = []
        self._written: list[Receipt] = []
        self._handles: list[PutHandle] = []

    @property
    def is_full(self) -> bool:
        # By bytes too: what is stored and not shown yet has a time to live.
        nbytes = sum(chunk.bytes for receipt in self._written for chunk in receipt.chunks)
        return len(self._late) >= SEGMENTS_PER_CALL or nbytes >= BYTES_PER_CALL

    def add(self, manifest: Manifest, parts: Sequence[Piece]) -> None:
        """Start storing one segment's rows."""
        try:
            receipts = [self._store(manifest, start, rows) for start, rows in parts]
        except BaseException:
            self._drop()
            raise
        self._late.append(LateValue(segment_id=manifest.segment_id, receipts=receipts))

    def show(self) -> int:
        """Wait for what is stored and show it; says how many segments changed."""
        if not self._late:
            return 0
        run = self._run
        try:
            for handle in self._handles:
                handle.wait(run.put_timeout_s)
            command = PutValues(
                run=run.name,
                epoch=run.epoch,
                claim_id=self._claim_id,
                field=self._field.name,
                values=self._late,
            )
            return ask(run.backend, command, Done).count
        except BaseException:
            self._drop()
            raise

    def _store(self, manifest: Manifest, start: int, rows: Any) -> Receipt:
        run, field = self._run, self._field
        source = as_source(field, rows, start)
        names = (run.name, run.epoch, self._claim_id, manifest.segment_id, field.name, start, source.dtype)
        digest = xxhash.xxh3_128(json.dumps(names).encode())
        digest.update(np.ascontiguousarray(source.values).reshape(-1).view(np.uint8).data)
        if source.valid is not None:
            digest.update(np.packbits(source.valid).data)
        encoded = encode(
            field,
            rows,
            start,
            run=run.name,
            epoch=run.epoch,
            shard=self._shard(manifest),
            ids=ContentIds(digest.digest(), _time_ms(manifest)),
            chunk_bytes=run.chunk_bytes,
        )
        self._written.append(encoded.receipt)
        self._handles += [run.backend.put(field, chunks) for chunks in encoded.chunks_by_group if chunks]
        return encoded.receipt

    def _shard(self, manifest: Manifest) -> int:
        """Beside the segment's own rows: the same values again must get the same ids."""
        number = _shard_of(manifest)
        return self._run.backend.shard() if number is None else number

    def _drop(self) -> None:
        """Free what was stored and is shown nowhere."""
        for handle in self._handles:
            try:
                handle.wait(CLEAN_UP_S)
            except ArrowTQError:
                # The put failed: there is nothing to free, and its error is the one that is raised.
                continue
        names = [chunk.hex for chunk in chunk_ids(self._written)]
        try:
            if names:
                ask(self._run.backend, DropChunks(run=self._run.name, chunk_ids=names), Done)
        except ArrowTQError:
            # A store out of reach reaps them itself: nothing attached them.
            return


def _shard_of(manifest: Manifest) -> int | None:
    """Where the segment's first chunk is; None: it owns none."""
    return int(manifest.owned["high"].min()) & SHARD_MAX if len(manifest.owned) else None


def _time_ms(manifest: Manifest) -> int:
    """When the segment's first chunk was made: ids of what is put later must not depend on when."""
    return int(manifest.owned["high"].min()) >> 16 if len(manifest.owned) else 0


def _per_segment(field: Field, manifests: Sequence[Manifest], arrays: object) -> list[Any]:
    """One array a segment, from a list of them or a packed one."""
    if isinstance(arrays, list | tuple):
        if len(arrays) != len(manifests):
            raise RowCountMismatch(
                f"field {field.name!r}: {len(arrays)} arrays for {len(manifests)} segments",
                field=field.name,
            )
        return list(arrays)
    packed = cast("Any", arrays)
    total = sum(manifest.num_tokens for manifest in manifests)
    rows = len(packed) if hasattr(packed, "__len__") else -1
    if rows != total:
        raise RowCountMismatch(
            f"field {field.name!r}: a packed array of {rows} rows, the {len(manifests)} segments have "
            f"{total} tokens (pass a list for one array a segment)",
            field=field.name,
        )
    ends = np.cumsum([manifest.num_tokens for manifest in manifests]).tolist()
    return [packed[end - manifest.num_tokens : end] for end, manifest in zip(ends, manifests, strict=True)]


def _pieces(field: Field, manifest: Manifest, rows: Any) -> list[Piece]:
    """Where a segment's rows go. What lies between sampled ranges is stored, and never shown.

    Raises:
        RowCountMismatch: names the segment and every number of rows that would do.
    """
    domain = domain_ranges(field, manifest.num_tokens, manifest.sampled).tolist()
    count = len(rows) if hasattr(rows, "__len__") else -1
    total = manifest.num_tokens
    inside = sum(end - start for start, end in domain)
    first, last = (domain[0][0], domain[-1][1]) if domain else (total, total)
    if count == total:
        return [(first, rows[first:last])] if domain else []
    if count == total - first and field.domain == "sampled":
        return [(first, rows[: last - first])] if domain else []
    if count == inside:
        ends = np.cumsum([end - start for start, end in domain]).tolist()
        return [
            (start, rows[done - (end - start) : done])
            for (start, end), done in zip(domain, ends, strict=True)
        ]
    expected = sorted({total, inside, *([total - first] if field.domain == "sampled" else [])})
    raise RowCountMismatch(
        f"field {field.name!r}, segment {manifest.segment_id!r}: {count} rows, expected "
        f"{' or '.join(map(str, expected))} (it has {total} tokens)",
        field=field.name,
        segment_id=manifest.segment_id,
        rows=count,
        expected=expected,
    )
