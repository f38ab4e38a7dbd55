"""Reads as views of the server's extents: one action says where chunks are, nothing is copied."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from arrow_tq.backend import Read, Rows
from arrow_tq.client.connection import Connection
from arrow_tq.client.samehost.host import SOON_S, Host, is_stale
from arrow_tq.client.samehost.locking import Memory
from arrow_tq.client.samehost.mappings import Mapping, Mappings, Seen, reader_of
from arrow_tq.layout.columns import ColumnLayout, Mask, Values
from arrow_tq.layout.messages import pad
from arrow_tq.layout.projection import project
from arrow_tq.logs import logger
from arrow_tq_schemas.chunks import checksum
from arrow_tq_schemas.commands import ChunkLocations, LocateChunks
from arrow_tq_schemas.errors import (
    ArrowTQError,
    ChunkLost,
    ChunkPending,
    DeadlineExceeded,
    MalformedMessage,
)
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.locations import Locations, pack_ids, unpack_locations
from arrow_tq_schemas.spans import chunk_ids

LOCATE_S = 1e-4
"""Of the deadline for each chunk that is asked for."""
ATTEMPTS = 2
"""An extent may be released between the answer and its being mapped: then the answer is asked for again."""
PENDING_POLL_S = (0.02, 0.2)
"""First and longest pause between questions for chunks whose step is open."""
PENDING_WARN_S = 10.0
"""How often that is said."""
Chunks = dict[ChunkId, tuple[Values, Mask | None]]


class HostReads:
    """Reads of one connection that need not go over it. Thread-safe.

    Attributes:
        reads: answered from mapped extents.
        read_bytes: payload that they gave.
    """

    def __init__(self, connection: Connection) -> None:
        options = connection.options
        self.host = Host(connection)
        self._connection = connection
        self._mappings = Mappings(options.map_idle_s, options.map_extents_max)
        self._layouts: dict[tuple[str, str, int], ColumnLayout] = {}
        self.reads = 0
        self.read_bytes = 0

    @property
    def mapped_extents(self) -> int:
        return len(self._mappings)

    def read(self, request: Read) -> Iterator[Rows] | None:
        """The rows in request order, one block a span; None: ask over the wire.

        Raises:
            ChunkReleased, ChunkLost, ChunkPending: as over the wire.
        """
        ids = [chunk_id.sibling(request.group) for chunk_id in chunk_ids(request.spans)]
        chunks = self._chunks(request, list(dict.fromkeys(ids)))
        if chunks is None:
            return None
        self.reads += 1
        return self._rows(request, ids, chunks)

    def close(self) -> None:
        self._mappings.close()

    def _chunks(self, request: Read, ids: Sequence[ChunkId]) -> Chunks | None:
        """Every chunk of the request before the first row leaves, or None where some cannot be mapped."""
        began = warned = time.monotonic()
        until = began + request.wait_s
        attempts, pause_s = 0, PENDING_POLL_S[0]
        while attempts < ATTEMPTS:
            proof = self.host.proof()
            if proof is None:
                return None
            try:
                chunks = self._located(request, ids, proof)
            except ChunkPending as error:
                now = time.monotonic()
                if now >= until:
                    raise _waited(error, request.wait_s) from None
                if now - warned >= PENDING_WARN_S:
                    warned = now
                    logger("arrow_tq.client").warning(
                        "waiting for chunks whose step is open", run=request.run, field=request.field.name,
                        chunks=error.message, waited_s=round(now - began, 1),
                    )  # fmt: skip
                time.sleep(min(pause_s, until - now))
                pause_s = min(2 * pause_s, PENDING_POLL_S[1])
                continue
            except DeadlineExceeded:
                return None
            except ArrowTQError as error:
                if not is_stale(error):
                    raise
                self.host.forget(proof)
                chunks = None
            if chunks is not None:
                return chunks
            attempts += 1
        return None

    def _located(self, request: Read, ids: Sequence[ChunkId], proof: str) -> Chunks | None:
        """The chunks, where the server says they are; None where an extent cannot be mapped."""
        chunks: Chunks = {}
        step = int(self._connection.options.get_spans_max)
        for first in range(0, len(ids), step):
            asked = ids[first : first + step]
            command = LocateChunks(
                run=request.run, field=request.field.name, proof=proof, chunk_ids=pack_ids(asked)
            )
            # It only saves time: whoever does not answer is asked by the wire, which can tell why.
            told, reply = self.host.ask(command, ChunkLocations, SOON_S + len(asked) * LOCATE_S)
            found = unpack_locations(bytes(reply.blobs[0]), len(asked), len(told.extents))
            mapped: list[tuple[Mapping, Memory]] = []
            for place in told.extents:
                one = self._mappings.get(place)
                if one is None:
                    return None
                mapped.append(one)
            short = [
                index
                for index, size in enumerate(_ends(found, len(mapped)))
                if size > mapped[index][0].size_bytes
            ]
            if short:
                # Mapped while the server was cutting what lay ahead of its writer.
                self._mappings.drop(told.extents[index].token for index in short)
                return None
            self._take(request, asked, found, mapped, chunks)
        return chunks

    def _take(
        self,
        request: Read,
        ids: Sequence[ChunkId],
        found: Locations,
        mapped: Sequence[tuple[Mapping, Memory]],
        chunks: Chunks,
    ) -> None:
        layout = self._layout(request)
        for chunk_id, location in zip(ids, found, strict=True):
            mapping, memory = mapped[int(location["extent"])]
            seen = mapping.chunks.get(chunk_id)
            if seen is None:
                seen = _verified(request, layout, chunk_id, location, mapping, memory)
                mapping.chunks[chunk_id] = seen
            shape = (seen.rows, *layout.item_shape)
            chunks[chunk_id] = np.ndarray(shape, layout.dtype, memory, seen.offset), seen.valid

    def _layout(self, request: Read) -> ColumnLayout:
        key = (request.run, request.field.name, request.group)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = ColumnLayout(request.field.arrow_schema(request.group))
        return layout

    def _rows(self, request: Read, ids: Sequence[ChunkId], chunks: Chunks) -> Iterator[Rows]:
        rows = zip(ids, request.spans["row"].tolist(), request.spans["rows"].tolist(), strict=True)
        for chunk_id, first, count in rows:
            values, valid = chunks[chunk_id]
            if first + count > len(values):
                raise MalformedMessage(
                    f"chunk {chunk_id.hex}: rows {first} to {first + count} of {len(values)}"
                )
            part = values[first : first + count]
            if request.layers is not None:
                part = project(part, request.field, request.layers)
            self.read_bytes += part.nbytes
            yield Rows(part, None if valid is None else valid[first : first + count])


def _ends(found: Locations, extents: int) -> list[int]:
    """Where the last chunk asked for ends, by extent."""
    ends = np.zeros(extents, np.uint64)
    np.maximum.at(ends, found["extent"], found["offset"] + found["length"])
    return [int(end) for end in ends.tolist()]


def _verified(
    request: Read,
    layout: ColumnLayout,
    chunk_id: ChunkId,
    location: Locations,
    mapping: Mapping,
    memory: Memory,
) -> Seen:
    """A chunk that this process sees for the first time: its checksum says that it is that one."""
    end = int(location["offset"]) + int(location["length"])
    rows, nullable = int(location["rows"]), bool(location["nullable"])
    damaged = f"chunk {chunk_id.hex}: damaged where it is stored ({mapping.path})"
    try:
        values, valid = layout.read(reader_of(memory), end, rows, nullable)
    except ValueError:
        raise ChunkLost(damaged, ids=[chunk_id.hex]) from None
    seen = checksum(
        *(chunk_id, request.run, int(location["epoch"]), request.field.name, int(location["start"])),
        *(values, valid),
    )
    if seen != bytes(location["checksum"]).hex():
        raise ChunkLost(damaged, ids=[chunk_id.hex])
    return Seen(end - pad(rows * layout.row_bytes), rows, valid)


def _waited(error: ChunkPending, wait_s: float) -> ChunkPending:
    """The error with how long was waited, as the server would have said it."""
    return ChunkPending(f"{error.message} within {wait_s} s", **error.details)
