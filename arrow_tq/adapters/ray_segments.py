"""Segments as blocks of a Ray dataset: a task for each part, which reads it from the shard that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field as slot

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.data.context import DataContext

from arrow_tq.client.connection import Connection
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.tls import Tls
from arrow_tq_schemas.commands import View
from arrow_tq_schemas.errors import ArrowTQError, DeadlineExceeded, Unavailable
from arrow_tq_schemas.tickets import FlightQuery

BLOCK_BYTES = 64 << 20
"""Messages of some 2 MiB are joined to blocks of about this size."""


@dataclass(frozen=True, slots=True)
class SegmentsWanted:
    """Which rows, and how to reach the store. The arguments are those of ``ray.read_segments``."""

    url: str
    run: str
    field: str
    segment_ids: tuple[str, ...] | None
    where: str | None
    view: View
    group: int
    layers: tuple[int, ...] | None
    token: str | None = slot(repr=False)
    tls: Tls | None

    def connection(self, url: str) -> Connection:
        """To the catalog, or to a shard."""
        return Connection(url, self.token, ClientOptions(), self.tls)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows on one shard: a ticket and where it is taken, first of all, and at last at the catalog."""

    ticket: bytes
    url: str


class SegmentsSource(Datasource):  # type: ignore[misc]
    """What ``GetFlightInfo`` says about the segments: one read task an endpoint."""

    def __init__(self, wanted: SegmentsWanted) -> None:
        super().__init__()
        self._wanted = wanted
        query = FlightQuery(
            run=wanted.run,
            field=wanted.field,
            group=wanted.group,
            layers=None if wanted.layers is None else list(wanted.layers),
            segment_ids=None if wanted.segment_ids is None else list(wanted.segment_ids),
            where=wanted.where,
            view=wanted.view,
        )
        info = wanted.connection(wanted.url).info(query.model_dump_json().encode(), ClientOptions().action_s)
        self._bytes: int = info.total_bytes
        self._parts = [
            Part(endpoint.ticket.ticket, endpoint.locations[0].uri.decode()) for endpoint in info.endpoints
        ]

    @property
    def parts(self) -> int:
        """How many read tasks there are."""
        return len(self._parts)

    def get_name(self) -> str:
        """Shown in Ray's progress bars."""
        return "ArrowTQSegments"

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes of the field's values."""
        return self._bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """One a shard: a shard is read as fast by one reader as by many."""
        metadata = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return [ReadTask(_reading(self._wanted, part, per_task_row_limit), metadata) for part in self._parts]


def _reading(wanted: SegmentsWanted, part: Part, rows_max: int | None) -> Callable[[], Iterable[pa.Table]]:
    return lambda: _blocks(wanted, part, rows_max)


def _blocks(wanted: SegmentsWanted, part: Part, rows_max: int | None) -> Iterator[pa.Table]:
    pending: list[pa.RecordBatch] = []
    size, left = 0, rows_max
    for batch in _batches(wanted, part):
        if left is not None:
            batch = batch.slice(0, left)
            left -= batch.num_rows
        pending.append(batch)
        size += batch.nbytes
        if size >= BLOCK_BYTES:
            yield pa.Table.from_batches(pending)
            pending, size = [], 0
        if left == 0:
            break
    if pending:
        yield pa.Table.from_batches(pending)


def _batches(wanted: SegmentsWanted, part: Part) -> Iterator[pa.RecordBatch]:
    """From the shard; where that does not answer, what the catalog says of it: rows, or a typed error."""
    seen = False
    try:
        for batch in _stream(wanted, part.ticket, part.url):
            seen = True
            yield batch
        return
    except (Unavailable, DeadlineExceeded) as error:
        if seen or part.url == wanted.url:
            raise
        failure: ArrowTQError = error
    try:
        yield from _stream(wanted, part.ticket, wanted.url)
    except Unavailable:
        raise failure from None


def _stream(wanted: SegmentsWanted, ticket: bytes, url: str) -> Iterator[pa.RecordBatch]:
    connection, deadline_s = wanted.connection(url), ClientOptions().read_s
    what = f"read of {wanted.field!r}"
    reader = connection.get(ticket, deadline_s, what)
    yield from connection.batches(reader, what, deadline_s)
