"""Commands of a client on the server's own machine: finding out, mapping, granted files."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field as Bound

from arrow_tq_schemas.chunks import Count
from arrow_tq_schemas.command_base import Command, Wire
from arrow_tq_schemas.commands.terms import Names


class FindHost(Command):
    """How a client finds out whether it shares the server's machine, and its memory."""

    verb: ClassVar[str] = "find_host"


class HostInfo(Wire):
    """A client is on the same host where its boot id is this one and it can read the proof."""

    boot_id: str
    proof_path: str
    """A file of 32 hex digits that the server wrote, for its own user's eyes."""


class LocateChunks(Command):
    """Where committed chunks lie, for a client that maps their extents. Blob 0: ``LOCATION_DTYPE`` rows.

    Errors are those of a read: released, lost, or pending chunks are named.
    """

    verb: ClassVar[str] = "locate_chunks"
    run: str
    field: str
    proof: str
    """What the proof holds: places are told to nobody else."""
    chunk_ids: str
    """Base64 of 16 bytes each, layer group included."""


class ExtentPlace(Wire):
    """A file that chunks lie in. Its name is gone, or is another file's, once the chunks are released."""

    token: str
    """Names this file's content: another extent, also in the same memory, has another one."""
    path: str


class ChunkLocations(Wire):
    extents: list[ExtentPlace]


class GrantExtent(Command):
    """Ask for a file to write chunks of one field and layer group into. Refused: send them instead."""

    verb: ClassVar[str] = "grant_extent"
    run: str
    field: str
    group: Annotated[int, Bound(ge=0, le=255)] = 0
    proof: str
    size_bytes: Annotated[int, Bound(ge=1 << 20, le=1 << 30)]


class ExtentGrant(Wire):
    grant: str
    path: str
    size_bytes: Count
    """All of it has blocks."""
    used_bytes: Count
    """Where the first chunk may begin: after the schema."""
    lease_s: float
    """Neither used nor kept for so long, it ends."""


class AdoptedChunk(Wire):
    """A chunk that was written into a granted file."""

    offset: Count
    """Of its message; not before the end of one that was adopted already."""
    header: str
    """Its ``ChunkHeader``, as it stands in the message."""


class AdoptChunks(Command):
    """Store chunks that lie in a granted file. Each by itself; asked again it answers the same."""

    verb: ClassVar[str] = "adopt_chunks"
    run: str
    field: str
    proof: str
    grant: str
    chunks: Annotated[list[AdoptedChunk], Bound(max_length=4096)]


class ChunkVerdicts(Wire):
    errors: list[dict[str, object] | None]
    """One a chunk, in order; None: stored."""


class KeepGrants(Command):
    """Renew the leases of grants."""

    verb: ClassVar[str] = "keep_grants"
    proof: str
    grants: Names


class GrantsKept(Wire):
    grants: Names
    """Those that are still there."""


class EndGrants(Command):
    """Nothing more is written into these files."""

    verb: ClassVar[str] = "end_grants"
    proof: str
    grants: Names
