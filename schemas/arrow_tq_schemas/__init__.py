"""The contract of arrow-tq: what is stored, what travels, and what can go wrong. No I/O."""

from arrow_tq_schemas.chunks import Chunk, ChunkHeader, checksum
from arrow_tq_schemas.fields import Field, Task
from arrow_tq_schemas.ids import ChunkId, IdFactory
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.spans import SPAN_DTYPE, Span

__all__ = [
    "SPAN_DTYPE",
    "Chunk",
    "ChunkHeader",
    "ChunkId",
    "Field",
    "IdFactory",
    "Manifest",
    "Receipt",
    "Span",
    "StoredChunk",
    "Task",
    "checksum",
]
