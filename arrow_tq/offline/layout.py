"""The files of an export: their names, their schemas, and the manifest that says whether they are whole.

The manifest is written last, so a folder without one is no export. It carries size, rows and SHA-256 of each
file, and a digest of itself: what was cut off or edited is refused before anything is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError

from arrow_tq_schemas.chunks import Count, explain
from arrow_tq_schemas.commands import Durability, TaskSpec, View
from arrow_tq_schemas.errors import MalformedMessage, Unsupported
from arrow_tq_schemas.fields import Field

FORMAT: Literal["arrow-tq-export"] = "arrow-tq-export"
VERSION = 1
MANIFEST = "manifest.json"
SESSIONS, VIEWS, STEPS, RECEIPTS, SEGMENTS = (
    *("sessions.arrows", "views.arrows", "steps.arrows", "receipts.arrows"),
    "segments.arrows",
)
STEP_BLOBS, BLOBS = "step_blobs.arrows", "blobs.arrows"
MANIFEST_BYTES_MAX = 64 << 20
HASH_BYTES = 1 << 20
_TEXT, _INT, _REAL = pa.string(), pa.int64(), pa.float64()

SCHEMAS = {
    SESSIONS: pa.schema(
        [
            ("session_id", _TEXT),
            ("group_id", _TEXT),
            ("tasks", pa.list_(_TEXT)),
            ("columns", _TEXT),
        ]
    ),
    VIEWS: pa.schema([("session_id", _TEXT), ("view", _TEXT), ("reward", _REAL), ("columns", _TEXT)]),
    STEPS: pa.schema(
        [
            ("session_id", _TEXT),
            ("step_id", _TEXT),
            ("parent", _TEXT),
            ("messages", _TEXT),
            ("version", _TEXT),
            ("sampled_start", _INT),
            ("sampled_end", _INT),
            ("tools", _TEXT),
            ("retry_of", _TEXT),
            ("extends", pa.bool_()),
            ("receipts", _INT),
        ]
    ),
    STEP_BLOBS: pa.schema(
        [("session_id", _TEXT), ("step_id", _TEXT), ("blob_id", _TEXT), ("media_type", _TEXT)]
    ),
    RECEIPTS: pa.schema(
        [
            ("session_id", _TEXT),
            ("step_id", _TEXT),
            ("field", _TEXT),
            ("start", _INT),
            ("rows", _INT),
            ("pieces", pa.list_(_INT)),
        ]
    ),
}
BLOB_SCHEMA = pa.schema([("blob_id", _TEXT), ("content", pa.large_binary())])
"""Of ``blobs.arrows``: each file once, one a record batch; blob_id is the SHA-256 of its content."""
"""Columns that are JSON text: ``columns`` (objects) and ``messages`` (arrays, ASCII). ``receipts`` counts
those of the step, ``pieces`` are the rows of the record batches that a receipt has in each payload file of
its field."""


class ExportedFile(BaseModel):
    """One file beside the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Bound(pattern=r"^[A-Za-z0-9_]+(\.[0-9]+)?\.arrows$")]
    bytes: Count
    rows: Count
    sha256: Annotated[str, Bound(pattern=r"^[0-9a-f]{64}$")]


class ExportManifest(BaseModel):
    """``manifest.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["arrow-tq-export"] = FORMAT
    version: Annotated[int, Bound(ge=1)] = VERSION
    run: str
    fields: list[dict[str, object]]
    tasks: list[TaskSpec]
    durability: Durability
    policy_version: str | None
    versions: list[str]
    """Weight versions of the run, in their order."""
    view: View
    """Of the segments that were chosen; other views of their sessions are there as well."""
    task: str | None
    """Whose claim it was."""
    sessions: Count
    steps: Count
    segments: Count
    tokens: Count
    files: list[ExportedFile]
    digest: str = ""
    """SHA-256 of the manifest itself, as JSON with sorted keys and this empty."""

    def declared(self) -> dict[str, Field]:
        """The exported fields by name."""
        return {field.name: field for field in map(Field.from_json, self.fields)}

    def own_digest(self) -> str:
        plain = self.model_copy(update={"digest": ""}).model_dump(mode="json")
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write it so that it is there whole or not at all."""
        sealed = self.model_copy(update={"digest": self.own_digest()})
        part = folder / f"{MANIFEST}.part"
        with part.open("w") as file:
            file.write(sealed.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> ExportManifest:
        """Raises ``MalformedMessage`` for one that was edited or cut off, ``Unsupported`` for a newer one."""
        path = folder / MANIFEST
        raw = path.read_bytes() if path.stat().st_size <= MANIFEST_BYTES_MAX else b""
        try:
            manifest = cls.model_validate_json(raw)
        except ValidationError as error:
            raise MalformedMessage(f"{path}: {explain(error)}", path=str(path)) from None
        if manifest.version > VERSION:
            raise Unsupported(
                f"{path}: an export of version {manifest.version}, this arrow-tq reads {VERSION}",
                version=manifest.version,
            )
        if manifest.digest != manifest.own_digest():
            raise MalformedMessage(f"{path}: it was edited: its digest does not fit", path=str(path))
        return manifest

    def check_files(self, folder: Path) -> None:
        """Read every file once. Raises ``MalformedMessage`` naming one that is missing, cut off or edited."""
        for file in self.files:
            path = folder / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                there = "missing" if size is None else f"{size} bytes"
                raise MalformedMessage(
                    f"{path}: {there}, the manifest says {file.bytes} bytes: the export is torn",
                    path=str(path),
                )
            if file_digest(path) != file.sha256:
                raise MalformedMessage(
                    f"{path}: its content was changed: the digest does not fit", path=str(path)
                )


def is_export(path: Path) -> bool:
    """Whether this is an export's folder, or its manifest, by what is in it."""
    manifest = path / MANIFEST if path.is_dir() else path
    if not manifest.is_file():
        # A pipe would wait for a writer.
        return False
    try:
        with manifest.open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False


def payload_name(field: str, group: int) -> str:
    """The file of one field's layer group."""
    return f"{field}.{group}.arrows"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
