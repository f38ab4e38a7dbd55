"""Reading blobs: the bytes of a file that a step refers to."""

from __future__ import annotations

import numpy as np

from arrow_tq.backend import Backend, Read
from arrow_tq.calls import ask, checked
from arrow_tq_schemas.blobs import BLOB_FIELD, BlobRef, blob_id
from arrow_tq_schemas.commands import BlobInfo, FindBlob
from arrow_tq_schemas.errors import ChunkLost, ChunkReleased, InvalidInput, NotFound
from arrow_tq_schemas.spans import Span, to_spans


def read_blob(backend: Backend, run: str, blob: BlobRef | str) -> bytes:
    """The content, copied once, and compared with the SHA-256 that names it.

    Raises:
        NotFound: the run never had it, or no step that attached it is committed yet.
        ChunkReleased, ChunkLost: every step that referred to it was let go; it is gone or corrupt.
        InvalidInput: no blob's id; or a reference of another run.
    """
    name = _name(run, blob)
    info = _find(backend, run, name)
    try:
        return _read(backend, run, info)
    except ChunkReleased:
        again = _find(backend, run, name)
        if again.chunks == info.chunks:
            raise
    # It was let go and attached again since we asked.
    return _read(backend, run, again)


def _name(run: str, blob: BlobRef | str) -> str:
    if isinstance(blob, str) and blob.startswith("{"):
        blob = BlobRef.from_json(blob)
    if isinstance(blob, str):
        return blob
    if not isinstance(blob, BlobRef):
        raise InvalidInput(f"blob {blob!r}: expected a BlobRef or a blob's id")
    if blob.run != run:
        raise InvalidInput(f"blob {blob.blob_id}: of run {blob.run!r}, not {run!r}")
    return blob.blob_id


def _find(backend: Backend, run: str, name: str) -> BlobInfo:
    with checked("blob"):
        command = FindBlob(run=run, blob_id=name)
    info = ask(backend, command, BlobInfo)
    if info.state == "unknown":
        raise NotFound(f"run {run!r} has no blob {name}", blob_id=name)
    if info.state == "released":
        raise ChunkReleased(f"blob {name}: released with the last step that referred to it", blob_id=name)
    if info.state == "lost":
        raise ChunkLost(f"blob {name}: not stored here any more, or corrupt", blob_id=name)
    return info


def _read(backend: Backend, run: str, info: BlobInfo) -> bytes:
    spans = to_spans([Span(chunk.start, chunk.chunk_id, 0, chunk.rows) for chunk in info.chunks])
    blocks = backend.read(Read(run, BLOB_FIELD, 0, None, spans)) if len(spans) else ()
    content = b"".join(np.ascontiguousarray(rows.values).data for rows in blocks)
    if blob_id(content) != info.blob_id:
        raise ChunkLost(f"blob {info.blob_id}: its bytes have another SHA-256", blob_id=info.blob_id)
    return content
