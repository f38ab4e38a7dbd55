"""Reads whose chunks are on several shards: far ones are read at the same time, near ones where they lie."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from arrow_tq.backend import Read, Rows
from arrow_tq.client.ahead import ReadAhead
from arrow_tq_schemas.errors import ChunkLost, ChunkPending, InternalError
from arrow_tq_schemas.ids import SHARD_MAX
from arrow_tq_schemas.spans import Spans, chunk_ids

AHEAD_MAX = 64
"""Messages that one shard may be ahead of the consumer: of some 2 MiB each."""
STALL_S = 2.0
"""After so long without a message it is asked whether the shard is still up."""
IDS_NAMED_MAX = 5
Reader = Callable[[Read], Iterator[Rows]]


class Shards(Protocol):
    """Where shards are read, and what is known of them."""

    def reader(self, number: int) -> Reader:
        """How chunks of a shard are read. Raises ``ChunkLost`` for a shard that does not exist."""

    def views(self, number: int, request: Read) -> Iterator[Rows] | None:
        """Rows of a shard of this machine as views, one block a span; None: they have to travel.

        Raises:
            ChunkPending, ChunkReleased, ChunkLost: as a read would.
        """

    def is_down(self, number: int) -> str | None:
        """Where the shard was, if it is known to be down now; None: it may still answer."""


def shard_numbers(spans: Spans) -> npt.NDArray[np.int64]:
    """The shard of each span: its bits in the chunk ids."""
    return (spans["high"] & np.uint64(SHARD_MAX)).astype(np.int64)


def unreadable(number: int, url: str, request: Read, why: str) -> ChunkPending:
    """The error for a shard that does not answer: names it, and exactly the chunks that were asked of it."""
    ids = [one.sibling(request.group).hex for one in dict.fromkeys(chunk_ids(request.spans))]
    return ChunkPending(
        f"shard {number} at {url} does not answer ({why}): {_named(ids)} of field {request.field.name!r} can "
        "be read again when it is back",
        ids=ids,
        shard=number,
        url=url,
    )


def no_such_shard(number: int, request: Read) -> ChunkLost:
    """The error for chunks of a shard that is not in the cluster."""
    ids = [one.sibling(request.group).hex for one in dict.fromkeys(chunk_ids(request.spans))]
    return ChunkLost(f"{_named(ids)}: there is no shard {number}", ids=ids, shard=number)


def read_shards(shards: Shards, request: Read) -> Iterator[Rows]:
    """The rows of all spans in request order; each shard that they travel from has a thread of its own.

    Raises:
        ChunkPending: a shard is down; names it and its chunks of this request.
        ChunkLost: there is no such shard; names its chunks.
    """
    numbers = shard_numbers(request.spans)
    streams: dict[int, _Stream] = {}
    views: dict[int, Iterator[Rows]] = {}
    try:
        for number in np.unique(numbers).tolist():
            part = replace(request, spans=request.spans[numbers == number])
            found = shards.views(number, part)
            if found is not None:
                views[number] = found
                continue
            streams[number] = stream = _Stream(shards, number, part)
            stream.ahead.start()
        for number, spans, rows in _turns(numbers, request.spans):
            if number in views:
                # One block a span, as in the shard's own process.
                yield from islice(views[number], spans)
            else:
                yield from streams[number].take(rows)
    finally:
        for stream in streams.values():
            stream.ahead.stop()


def _turns(numbers: npt.NDArray[np.int64], spans: Spans) -> Iterator[tuple[int, int, int]]:
    """(shard, spans, rows) of consecutive spans on one shard."""
    if not len(numbers):
        return
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1])
    rows = np.add.reduceat(spans["rows"].astype(np.int64), firsts)
    counts = np.diff(firsts, append=len(numbers))
    yield from zip(numbers[firsts].tolist(), counts.tolist(), rows.tolist(), strict=True)


class _Stream:
    """One shard's part of a read; ``ahead`` is started and stopped by whoever reads."""

    def __init__(self, shards: Shards, number: int, request: Read) -> None:
        self._shards = shards
        self._number = number
        self._request = request
        self.ahead = ReadAhead(
            lambda: shards.reader(number)(request),
            *(AHEAD_MAX, f"read of shard {number}", f"arrow-tq-read-shard-{number}"),
        )
        self._block: Rows | None = None

    def take(self, rows: int) -> Iterator[Rows]:
        """The next so many rows."""
        while rows:
            block = self._block or self._next()
            count = min(rows, len(block.values))
            yield _part(block, 0, count)
            rows -= count
            self._block = None if count == len(block.values) else _part(block, count, len(block.values))

    def _next(self) -> Rows:
        while True:
            try:
                rows = self.ahead.take(STALL_S)
            except queue.Empty:
                where = self._shards.is_down(self._number)
                if where is not None:
                    self.ahead.stop()
                    raise unreadable(self._number, where, self._request, "its lease ran out") from None
                continue
            if rows is None:
                raise InternalError(f"shard {self._number}: the answer is shorter than asked")
            if len(rows.values):
                return rows


def _part(block: Rows, first: int, end: int) -> Rows:
    if first == 0 and end == len(block.values):
        return block
    return Rows(block.values[first:end], None if block.valid is None else block.valid[first:end])


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - IDS_NAMED_MAX} more" if len(ids) > IDS_NAMED_MAX else ""
    return f"chunk{'s' if len(ids) > 1 else ''} {', '.join(ids[:IDS_NAMED_MAX])}{more}"
