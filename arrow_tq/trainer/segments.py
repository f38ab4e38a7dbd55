"""Loads segments' metadata and manifests."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from arrow_tq.backend import Backend
from arrow_tq.calls import read_table
from arrow_tq_schemas.commands import GetSegments, View
from arrow_tq_schemas.errors import InternalError
from arrow_tq_schemas.manifests import Manifest

SEGMENTS_PER_CALL = 4096
ENDED = ("done", "discarded")
"""States of segments whose payload was released."""


def load(
    backend: Backend, run: str, ids: Sequence[str], view: View = "lineage"
) -> tuple[pa.Table, list[Manifest]]:
    """Metadata rows and manifests of these segments (or sessions), in order.

    Raises:
        NotFound: an id is neither a segment nor a session of the run.
        ChunkReleased: a segment was discarded or is done.
    """
    tables: list[pa.Table] = []
    manifests: list[Manifest] = []
    for first in range(0, max(len(ids), 1), SEGMENTS_PER_CALL):
        part = list(ids[first : first + SEGMENTS_PER_CALL])
        reply = backend.execute(GetSegments(run=run, ids=part, view=view))
        table = read_table(reply.blobs[0])
        if len(reply.blobs) != table.num_rows + 1:
            raise InternalError(f"{len(reply.blobs) - 1} manifests for {table.num_rows} segments")
        tables.append(table)
        manifests.extend(Manifest.decode(blob) for blob in reply.blobs[1:])
    return pa.concat_tables(tables, promote_options="permissive"), manifests


def present(backend: Backend, run: str, ids: Sequence[str]) -> set[str]:
    """Those of these segments whose payload is still kept."""
    found: set[str] = set()
    for first in range(0, len(ids), SEGMENTS_PER_CALL):
        command = GetSegments(run=run, ids=list(ids[first : first + SEGMENTS_PER_CALL]), manifests=False)
        table = read_table(backend.execute(command).blobs[0])
        names, states = (table.column(name).to_pylist() for name in ("segment_id", "status"))
        found.update(name for name, state in zip(names, states, strict=True) if state not in ENDED)
    return found
