"""Blobs: files that an agent saw (screenshots, documents), named by their content.

A blob is stored once a run, however many steps refer to it: its id is the SHA-256 of its bytes, which
nobody can make two files share. Its bytes are ordinary chunks of the reserved field ``BLOB_FIELD``, a row
a byte, so that all that holds for payload (checksums, recovery, capacity, durability) holds for them.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError

from arrow_tq_schemas.chunks import Count, explain
from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.receipts import Receipt

BLOB_FIELD = Field("_blobs", "uint8")
"""The field whose chunks are blobs' bytes; no run can declare one of its name."""
BlobId = Annotated[str, Bound(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of the content, as hex."""


class BlobRef(BaseModel):
    """What ``step.attach_blob`` gives: names a blob, in a few hundred bytes of JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    blob_id: BlobId
    media_type: str
    bytes: Count

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> BlobRef:
        """Raises ``MalformedMessage`` naming the key and the value that do not fit."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise MalformedMessage(f"blob reference: {explain(error)}") from None


class StepBlob(BaseModel):
    """One reference of a step to a blob."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blob_id: BlobId
    media_type: str
    bytes: Count
    receipt: Receipt | None = None
    """Where its bytes are, if this step stored them; None: the run has them already."""


def blob_id(content: bytes) -> str:
    """The id of a blob with this content."""
    return hashlib.sha256(content).hexdigest()
