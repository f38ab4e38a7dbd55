"""Reads spans from a shard, and says of each missing chunk why it is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from arrow_tq.backend import Read, Rows
from arrow_tq.layout.columns import Mask, Values
from arrow_tq.layout.projection import project
from arrow_tq.logs import logger
from arrow_tq.store.extent import Entry
from arrow_tq.store.shard import Shard
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.errors import ChunkLost, ChunkPending, ChunkReleased, MalformedMessage
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import chunk_ids

PENDING_POLL_S = 0.02
PENDING_WARN_S = 10.0
IDS_NAMED_MAX = 5


class StateSource(Protocol):
    """Whoever knows each chunk's state: the catalog, or a link to it."""

    def chunk_states(self, ids: Sequence[ChunkId], run: str | None = None) -> list[str | None]:
        """committed, released, held, or None where no step attached it, or none of ``run``."""


class Reader:
    """Reads committed chunks only: a step is seen whole or not at all."""

    def __init__(self, shard: Shard, catalog: StateSource, poll_s: float = PENDING_POLL_S) -> None:
        self._shard = shard
        self._catalog = catalog
        self._log = logger("arrow_tq.reading")
        self._poll_s = poll_s
        self.chunks_read = 0
        self.bytes_read = 0

    def read(self, request: Read) -> Iterator[Rows]:
        """One block a span, zero-copy unless layers are gathered.

        Raises:
            ChunkReleased, ChunkLost: at once, naming the ids.
            ChunkPending: some step was still open after ``wait_s``.
        """
        wanted = [chunk_id.sibling(request.group) for chunk_id in chunk_ids(request.spans)]
        chunks = self._gather(wanted, request)
        spans = zip(wanted, request.spans["row"].tolist(), request.spans["rows"].tolist(), strict=True)
        for chunk_id, row, rows in spans:
            values, valid = self._part(chunk_id, chunks[chunk_id], row, rows)
            stay = request.layers is None and isinstance(chunks[chunk_id], Chunk)
            if request.layers is not None:
                values = project(values, request.field, request.layers)
            self.bytes_read += values.nbytes
            yield Rows(values, valid, stay)

    def _part(
        self, chunk_id: ChunkId, source: Chunk | Entry, row: int, rows: int
    ) -> tuple[Values, Mask | None]:
        """Rows of a chunk; those that a client wrote are read now, span by span."""
        count = source.rows if isinstance(source, Entry) else len(source.values)
        if row + rows > count:
            raise MalformedMessage(f"chunk {chunk_id.hex}: rows {row} to {row + rows} of {count}")
        if isinstance(source, Chunk):
            valid = None if source.valid is None else source.valid[row : row + rows]
            return source.values[row : row + rows], valid
        values = self._shard.part(chunk_id, source, row, rows)
        if values is None:
            # Released, or cut by its writer, since this answer began.
            self._explain([chunk_id], source.extent.key.run)
            raise ChunkLost(f"{_named([chunk_id])}: not stored here any more", ids=[chunk_id.hex])
        return values, None

    def locate(self, run: str, field: str, wanted: Sequence[ChunkId]) -> list[Entry]:
        """Where committed chunks of a field are, for whoever maps their extents.

        Raises:
            ChunkReleased, ChunkLost, ChunkPending: at once, naming the ids.
        """
        found = {chunk_id: self._located(chunk_id, run) for chunk_id in wanted}
        missing = [chunk_id for chunk_id, entry in found.items() if entry is None]
        if missing and self._explain(missing, run):
            # Committed a moment ago, and not told here yet.
            found |= {chunk_id: self._located(chunk_id, run) for chunk_id in missing}
            missing = [chunk_id for chunk_id in missing if found[chunk_id] is None]
        if missing:
            ids = [chunk_id.hex for chunk_id in missing]
            raise ChunkPending(f"{_named(missing)}: not committed", ids=ids)
        entries = []
        for chunk_id in wanted:
            entry = found[chunk_id]
            if entry is None or (entry.extent.key.run, entry.extent.key.field) != (run, field):
                raise ChunkLost(f"{_named([chunk_id])}: no chunk of {field!r} in run {run!r}")
            entries.append(entry)
        return entries

    def _gather(self, wanted: Sequence[ChunkId], request: Read) -> dict[ChunkId, Chunk | Entry]:
        """Every chunk of the request, before the first row leaves: an answer is whole or an error."""
        began = warned = time.monotonic()
        until = began + request.wait_s
        chunks: dict[ChunkId, Chunk | Entry] = {}
        missing = list(dict.fromkeys(wanted))
        while True:
            missing = [chunk_id for chunk_id in missing if not self._take(chunk_id, request, chunks)]
            if not missing:
                self.chunks_read += len(chunks)
                return chunks
            if self._explain(missing, request.run):
                continue
            now = time.monotonic()
            if now - warned >= PENDING_WARN_S:
                warned = now
                self._log.warning(
                    "waiting for chunks whose step is open",
                    run=request.run,
                    field=request.field.name,
                    chunks=_named(missing),
                    waited_s=round(now - began, 1),
                )
            if now >= until:
                raise ChunkPending(
                    f"{_named(missing)}: not committed within {request.wait_s} s",
                    ids=[chunk_id.hex for chunk_id in missing],
                )
            time.sleep(self._poll_s)

    def _take(self, chunk_id: ChunkId, request: Read, chunks: dict[ChunkId, Chunk | Entry]) -> bool:
        if not self._shard.is_pinned(chunk_id):
            return False
        chunk = self._shard.source(chunk_id)
        if chunk is None:
            return False
        key = chunk.extent.key if isinstance(chunk, Entry) else chunk.header
        if key.run != request.run:
            return False
        if key.field != request.field.name:
            raise ChunkLost(
                f"{_named([chunk_id])}: no chunk of {request.field.name!r} in run {request.run!r}"
            )
        chunks[chunk_id] = chunk
        return True

    def _explain(self, missing: Sequence[ChunkId], run: str) -> bool:
        """Raise for chunks that will never come; those whose step is open may. Whether any came just now.

        Ids of another run are told apart by nothing from ids of nobody: they do not exist here.
        """
        states = dict(zip(missing, self._catalog.chunk_states(missing, run), strict=True))
        released = [chunk_id for chunk_id in missing if states[chunk_id] == "released"]
        if released:
            names = [chunk_id.hex for chunk_id in released]
            raise ChunkReleased(f"{_named(released)}: released or discarded", ids=names)
        lost = [
            chunk_id
            for chunk_id in missing
            if (states[chunk_id] is None and not self._is_here(chunk_id, run))
            or (states[chunk_id] == "committed" and self._shard.get(chunk_id) is None)
        ]
        if lost:
            names = [chunk_id.hex for chunk_id in lost]
            raise ChunkLost(f"{_named(lost)}: not stored here any more, or corrupt", ids=names)
        attached = [one for one in missing if states[one] == "committed"]
        # In a process without the catalog that is told later, or was lost on the way.
        return bool(attached) and not self._shard.pin(attached)

    def _located(self, chunk_id: ChunkId, run: str) -> Entry | None:
        entry = self._shard.located(chunk_id)
        return None if entry is None or entry.extent.key.run != run else entry

    def _is_here(self, chunk_id: ChunkId, run: str) -> bool:
        header = self._shard.header(chunk_id)
        return header is not None and header.run == run


def _named(ids: Sequence[ChunkId]) -> str:
    shown = ", ".join(chunk_id.hex for chunk_id in ids[:IDS_NAMED_MAX])
    more = f" and {len(ids) - IDS_NAMED_MAX} more" if len(ids) > IDS_NAMED_MAX else ""
    return f"chunk{'s' if len(ids) > 1 else ''} {shown}{more}"
