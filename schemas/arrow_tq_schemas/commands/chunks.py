"""Commands of chunks that no step attached, and of blobs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field as Bound

from arrow_tq_schemas.blobs import BlobId
from arrow_tq_schemas.chunks import Count, Hex128
from arrow_tq_schemas.command_base import Command, Mutation, Wire
from arrow_tq_schemas.receipts import StoredChunk


class DropChunks(Mutation):
    """Free chunks that no step attached (a step that failed). Attached ones are left alone."""

    verb: ClassVar[str] = "drop_chunks"
    run: str
    chunk_ids: list[Hex128]


class KeepChunks(Command):
    """Chunks that no step attached yet are still wanted: their time to live begins anew.

    For writers whose step commits much later than its first rows were stored. Unknown ids are passed over;
    the reply counts those that are there and unattached. Again is the same as once, so it has no request id.
    """

    verb: ClassVar[str] = "keep_chunks"
    run: str
    chunk_ids: list[Hex128]


class FindBlob(Command):
    """What a run has of a blob: before its bytes are sent, and to read them.

    ``bytes`` is how many the caller would send: more than the store takes is refused here.
    """

    verb: ClassVar[str] = "find_blob"
    run: str
    blob_id: BlobId
    bytes: Count | None = None


class BlobInfo(Wire):
    """``state`` is unknown, stored, released or lost; only of a stored one are there chunks, in order."""

    blob_id: BlobId
    state: Literal["unknown", "stored", "released", "lost"]
    media_type: str | None = None
    bytes: Count | None = None
    chunks: list[StoredChunk] = Bound(default_factory=list)
