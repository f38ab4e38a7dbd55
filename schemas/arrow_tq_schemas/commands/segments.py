"""Commands of finalized segments: reading, changing, discarding."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field as Bound

from arrow_tq_schemas.chunks import Count, Hex128
from arrow_tq_schemas.command_base import Command, Mutation, Wire
from arrow_tq_schemas.commands.terms import Json, Names, View
from arrow_tq_schemas.receipts import Receipt


class GetSegments(Command):
    """Metadata rows (blob 0, Arrow IPC stream) and manifests (the blobs after it, in row order).

    Ids are segment ids, or session ids, which stand for all their segments in the view. An unknown id
    is ``NotFound``; a discarded segment is ``ChunkReleased`` where its manifest is asked for.
    """

    verb: ClassVar[str] = "get_segments"
    run: str
    ids: Names
    view: View = "lineage"
    manifests: bool = True


class ListSegments(Command):
    """Ids of finalized segments (blob 0: their table), newest last."""

    verb: ClassVar[str] = "list_segments"
    run: str | None = None
    where: str | None = None
    view: View = "lineage"
    limit: Annotated[int, Bound(ge=1, le=1_000_000)] = 1000


class UpdateSegments(Mutation):
    """Set ``reward`` and user columns that come after finalize."""

    verb: ClassVar[str] = "update_segments"
    run: str
    ids: Names
    view: View = "lineage"
    columns: Json


class LateValue(Wire):
    """One segment's rows of a late field: receipts that together cover all of its domain in the segment."""

    segment_id: str
    receipts: list[Receipt]


class PutValues(Mutation):
    """Show values that a trainer made in the segments of its claim; each segment whole, all or none.

    The same chunks again change nothing. Other values are refused while the claim that put the first ones
    is alive or was released; those of a claim that expired, or of an older epoch, are replaced.
    """

    verb: ClassVar[str] = "put_values"
    run: str
    epoch: Count
    claim_id: Hex128
    field: str
    values: list[LateValue]


class Discard(Mutation):
    """Free what will never be trained; rows stay, with the reason. Ids or ``where``, not both.

    A session id that is still open is ended as discarded.
    """

    verb: ClassVar[str] = "discard"
    run: str
    epoch: Count
    ids: Names | None = None
    where: str | None = None
    view: View = "lineage"
    reason: str
