"""Commands of whole dicts."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field as Bound

from arrow_tq_schemas.chunks import Count, Hex128
from arrow_tq_schemas.command_base import Command, Mutation, Seconds, Wire
from arrow_tq_schemas.commands.terms import Names

BUNDLE_METADATA_BYTES_MAX = 4096


class OpenBundleRun(Mutation):
    """Join a run to put bundles into it; where there is none of that name, make it, without fields.

    Fields may be declared later, once, by ``OpenRun``.
    """

    verb: ClassVar[str] = "open_bundle_run"
    run: str


class CommitBundle(Mutation):
    """Publish a bundle whose chunks are all stored: from now on readers find it."""

    verb: ClassVar[str] = "commit_bundle"
    run: str
    epoch: Count
    bundle_id: Hex128
    """Id of the bundle's first chunk; the others count up from it."""
    chunks: Annotated[int, Bound(ge=1, lt=1 << 24)]
    rows: Count
    bytes: Count
    """Payload of all chunks."""
    fields: Names
    """Names of the fields, for people; where a name is not text, what stands for it."""
    metadata: Annotated[str, Bound(max_length=BUNDLE_METADATA_BYTES_MAX)] = "null"
    """JSON that travels with the reference."""


class OpenBundle(Command):
    """Begin to read a bundle, under a lease that keeps its bytes; blob 0 is its structure (chunk 0)."""

    verb: ClassVar[str] = "open_bundle"
    run: str
    bundle_id: Hex128
    lease_s: Seconds = 600.0


class BundleInfo(Wire):
    run: str
    bundle_id: Hex128
    chunks: int
    rows: int
    bytes: int
    metadata: str
    lease_id: str


class CloseBundle(Command):
    """The readers of these leases are done. Unknown leases are passed over; the reply counts the others."""

    verb: ClassVar[str] = "close_bundle"
    run: str
    lease_ids: Names


class DeleteBundle(Mutation):
    """Take a bundle away: nobody finds it any more, and its bytes go when the last lease on it has ended.

    The reply counts the leases that were still open. Deleting again is the same as once.
    """

    verb: ClassVar[str] = "delete_bundle"
    run: str
    bundle_id: Hex128
