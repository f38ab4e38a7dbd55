"""Chunks that arrive by a put stream, one or many a batch: each checked by itself, stored under one lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from arrow_tq.store.bundles import receive_bundle_chunk
from arrow_tq.store.receiving import checked, rows_of
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.bundles import BUNDLE_FIELD
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.commands import RunInfo
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import PutStream

Outcome = ArrowTQError | None
"""Why a chunk was refused; None: it is stored."""


def store_batch(
    shard: Shard,
    stream: PutStream,
    field: Field,
    info: RunInfo,
    headers: Sequence[ChunkHeader],
    batch: pa.RecordBatch,
    check_place: Callable[[ChunkHeader], None],
) -> list[Outcome]:
    """Validate and store the chunks whose rows follow one another in a batch; an outcome for each.

    Args:
        check_place: raises for a chunk that does not belong to this shard.

    Raises:
        MalformedMessage: the batch is not what the stream and the headers say; nothing was stored.
    """
    values, valid = rows_of(stream, field, headers, batch)
    outcomes: list[Outcome] = [None] * len(headers)
    good: list[tuple[int, Chunk]] = []
    first = 0
    for index, header in enumerate(headers):
        rows = slice(first, first + header.rows)
        first += header.rows
        try:
            check_place(header)
            own = values[rows], None if valid is None else valid[rows]
            good.append((index, checked(stream, field, info, header, *own)))
        except ArrowTQError as error:
            outcomes[index] = error
    if field is BUNDLE_FIELD:
        for index, chunk in good:
            try:
                receive_bundle_chunk(shard, chunk.header, chunk.values, info)
            except ArrowTQError as error:
                outcomes[index] = error
        return outcomes
    refused = shard.put_many(field, [chunk for _, chunk in good], info.durability)
    for (index, _), outcome in zip(good, refused, strict=True):
        outcomes[index] = outcome
    return outcomes
