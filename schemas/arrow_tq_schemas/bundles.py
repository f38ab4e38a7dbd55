"""Bundles: the field that their chunks are stored under, and the reference that stands for one.

A bundle is a run of chunks whose ids count up by one. Chunk 0 holds its structure (UTF-8 JSON), the others
its values; all are bytes, one Arrow column of uint8. What the bytes mean is in the structure alone, so that
servers carry bundles without knowing them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.chunks import ChunkHeader, begin_checksum
from arrow_tq_schemas.commands import BUNDLE_METADATA_BYTES_MAX
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import RANDOM_BITS, ChunkId

BUNDLE_FIELD = Field("_bundle", "uint8")
"""Stands in for a field where a bundle's chunks are concerned. No run can declare one of that name."""
UNKNOWN_CHECKSUM = "0" * 32
"""In a header whose values are not there yet."""
DEFAULT_RUN = "default"
SCHEME = "atq-bundle"
_REFERENCE = re.compile(
    rf"{SCHEME}:([A-Za-z0-9][A-Za-z0-9._-]{{0,127}}):([0-9a-f]{{32}})(?:#(.*))?", re.DOTALL
)


class BundleRef(str):
    """A reference to a bundle: text, so it goes wherever JSON goes, and comes back as plain text.

    ``atq-bundle:RUN:ID``, under 200 bytes whatever the bundle holds; ``#`` and JSON follow where metadata
    was given for a scheduler.
    """

    __slots__ = ()

    @classmethod
    def make(cls, run: str, bundle_id: str, metadata: str = "null") -> BundleRef:
        """From its parts; ``metadata`` is JSON text."""
        return cls(f"{SCHEME}:{run}:{bundle_id}" + ("" if metadata == "null" else f"#{metadata}"))

    @classmethod
    def parse(cls, text: str) -> BundleRef:
        """Raises ``InvalidInput`` for what is no reference to a bundle."""
        if not isinstance(text, str) or not _REFERENCE.fullmatch(text):
            raise InvalidInput(f"bundle reference {str(text)[:80]!r}: expected {SCHEME}:RUN:ID")
        ChunkId.from_hex(cls(text).bundle_id)
        return cls(text)

    @property
    def run(self) -> str:
        return self._part(1)

    @property
    def bundle_id(self) -> str:
        return self._part(2)

    @property
    def metadata(self) -> object:
        """What ``put_bundle(metadata=...)`` was given; None where nothing was."""
        return json.loads(self._part(3) or "null")

    def _part(self, number: int) -> str:
        found = _REFERENCE.fullmatch(self)
        return "" if found is None else found[number] or ""


def metadata_json(metadata: object) -> str:
    """Metadata as JSON text, ASCII.

    Raises:
        InvalidInput: not JSON, or more than 4 KB of it.
    """
    try:
        text = json.dumps(metadata, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"bundle metadata: not JSON ({error})") from None
    if len(text) > BUNDLE_METADATA_BYTES_MAX:
        raise InvalidInput(f"bundle metadata of {len(text)} bytes: at most {BUNDLE_METADATA_BYTES_MAX}")
    return text


def chunk_header(bundle_id: str, index: int, nbytes: int, run: str, epoch: int) -> ChunkHeader:
    """The header of a bundle's chunk by its number, for bytes that are not there yet."""
    return ChunkHeader(
        id=chunk_id(bundle_id, index).hex,
        run=run,
        epoch=epoch,
        field=BUNDLE_FIELD.name,
        start=index,
        rows=nbytes,
        checksum=UNKNOWN_CHECKSUM,
    )


def checksummed(header: ChunkHeader, values: npt.NDArray[np.uint8], ends: Iterable[int] = ()) -> ChunkHeader:
    """The header of a chunk of these bytes, with their checksum.

    ``ends`` may write the values while it is gone through: at each end all before it is there.
    """
    parts = (header.chunk_id, header.run, header.epoch, header.field, header.start)
    digest = begin_checksum(*parts, len(values))
    done = 0
    for end in ends:
        digest.update(values[done:end].data)
        done = end
    digest.update(values[done:].data)
    return header.model_copy(update={"checksum": digest.hexdigest()})


def chunk_id(bundle_id: str, index: int) -> ChunkId:
    """Id of a bundle's chunk by its number."""
    first = ChunkId.from_hex(bundle_id)
    random = first.value & (1 << RANDOM_BITS) - 1
    if random + index >= 1 << RANDOM_BITS:
        raise InvalidInput(f"bundle {bundle_id}: chunk {index} is past the end of its ids")
    return ChunkId(first.value + index)
