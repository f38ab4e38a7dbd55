"""What a client asks of a store: one frozen model a command, one a reply.

In process a command object is handed over as it is. Over Flight it is a DoAction whose type is the
command's ``verb`` and whose body is its JSON; the reply is one Result: ``pack_reply``. Step commits
travel on a DoPut stream instead, many a message (``CommitSteps``).

Every command that changes something has a ``request_id`` made by the client. The store keeps the reply
under it, so a retried call is answered and not applied again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError, model_validator

from arrow_tq_schemas.blobs import BlobId, StepBlob
from arrow_tq_schemas.chunks import Count, Hex128, explain
from arrow_tq_schemas.cluster import (
    Beat,
    ChunkStates,
    ClusterMap,
    ConfirmChunks,
    Confirmed,
    Digest,
    DigestChunks,
    FetchChunks,
    GetCluster,
    GetRun,
    JoinCluster,
    Joined,
    News,
    States,
    TendChunks,
)
from arrow_tq_schemas.command_base import (
    Command as Command,
    Mutation as Mutation,
    Seconds as Seconds,
    Wire as Wire,
    new_request_id as new_request_id,
)
from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage, from_wire
from arrow_tq_schemas.receipts import Receipt, StoredChunk

View = Literal["lineage", "timeline"]
Durability = Literal["process", "disk"]
Names = list[str]
BUNDLE_METADATA_BYTES_MAX = 4096
Json = str
"""JSON text of user columns (an object) or messages (an array), ASCII: lone surrogates stay escaped."""


class TaskSpec(Wire):
    name: str
    fields: Names | None = None


# -- runs ------------------------------------------------------------------------------------------


class OpenRun(Mutation):
    """Create a run or join it. ``fields=None`` opens what exists; otherwise declarations must agree.

    ``epoch=None`` joins the current epoch; ``epoch=n`` advances it to n (compare-and-set from n - 1,
    and joining n where it is current already).
    """

    verb: ClassVar[str] = "open_run"
    run: str
    fields: list[dict[str, object]] | None = None
    tasks: list[TaskSpec] | None = None
    durability: Durability = "process"
    epoch: Count | None = None


class RunInfo(Wire):
    run: str
    fields: list[dict[str, object]]
    tasks: list[TaskSpec]
    durability: Durability
    epoch: Count
    policy_version: str | None = None


class SetPolicyVersion(Mutation):
    """The version that the trainer now serves; orders versions for staleness."""

    verb: ClassVar[str] = "set_policy_version"
    run: str
    epoch: Count
    version: str


class CloseGroup(Mutation):
    """No further session will join this group: whatever it has is whole."""

    verb: ClassVar[str] = "close_group"
    run: str
    epoch: Count
    group: str


class AddField(Mutation):
    """Declare one more field. Idempotent; sessions and segments that are there have no rows of it yet."""

    verb: ClassVar[str] = "add_field"
    run: str
    epoch: Count
    field: dict[str, object]


# -- sessions and steps ----------------------------------------------------------------------------


class OpenSession(Mutation):
    """Create a session, or open it again where it is still open.

    One that is finalized is opened by its id alone, so that its other view can be finalized.

    ``tasks=None`` means every task of the run, ``[]`` none (evaluation); past ``ttl_s`` an unfinished
    session, or a finished one without tasks, expires.
    """

    verb: ClassVar[str] = "open_session"
    run: str
    epoch: Count
    session_id: str
    group: str | None = None
    tasks: Names | None = None
    ttl_s: Seconds | None = None
    columns: Json = "{}"
    wait_s: Seconds = 0.0
    """How much longer the caller will ask again where there is no room: it counts as a waiter."""


class SessionInfo(Wire):
    session_id: str
    group: str | None
    status: str
    last_step: str | None
    ends: dict[str, int]
    """By field, the first position not covered yet (the largest end)."""


class StepCommit(Wire):
    """One step, whole: what its session, its place, its metadata and its receipts are."""

    run: str
    epoch: Count
    session_id: str
    step_id: str
    parent: str | None = None
    """The step before; None: the session's last committed step; ``""``: none, a tree of its own."""
    messages: Json = "[]"
    version: str | None = None
    sampled: tuple[Count, Count] | None = None
    receipts: list[Receipt] = Bound(default_factory=list)
    tools: str | None = None
    """Names the tools that the model could call; None says nothing. A change of it ends the segment."""
    retry_of: str | None = None
    """The step that this one replaces: from now on it and what follows it are superseded."""
    extends: bool = False
    """The messages only add to those before: tokens that differ are a mismatch, not a rewrite."""
    blobs: list[StepBlob] = Bound(default_factory=list)
    """Files that the agent saw, in the order in which they were attached."""

    @model_validator(mode="after")
    def _sampled_ascends(self) -> StepCommit:
        if self.sampled is not None and self.sampled[0] > self.sampled[1]:
            raise ValueError(f"sampled {self.sampled}: expected start <= end")
        return self


class CommitSteps(Command):
    """Many steps in one message, each atomic by itself; idempotent by (session, step id)."""

    verb: ClassVar[str] = "commit_steps"
    mutates: ClassVar[bool] = True
    steps: list[StepCommit]


class StepResult(Wire):
    """What became of one step of ``CommitSteps``: ``error`` is None, or its wire form."""

    step_id: str
    step_index: int = -1
    error: dict[str, object] | None = None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise from_wire(self.error)


class StepResults(Wire):
    results: list[StepResult]


class DropChunks(Mutation):
    """Free chunks that no step attached (a step that failed). Attached ones are left alone."""

    verb: ClassVar[str] = "drop_chunks"
    run: str
    chunk_ids: list[Hex128]


class AbandonStep(Mutation):
    """Leave a step, and all that follows it, out of every view, and free what they wrote."""

    verb: ClassVar[str] = "abandon_step"
    run: str
    epoch: Count
    session_id: str
    step_id: str


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


class FinalizeSession(Mutation):
    """Compose the session's segments of one view. Reads no payload. Each view can be finalized once."""

    verb: ClassVar[str] = "finalize_session"
    run: str
    epoch: Count
    session_id: str
    view: View = "lineage"
    reward: Annotated[float, Bound(allow_inf_nan=False)] | None = None
    columns: Json = "{}"


class SegmentInfo(Wire):
    segment_id: str
    session_id: str
    num_tokens: int
    loss_tokens: int
    complete_fields: Names
    finish_reason: str


class SegmentInfos(Wire):
    segments: list[SegmentInfo]


class AbortSession(Mutation):
    """End an open session and free everything it wrote."""

    verb: ClassVar[str] = "abort_session"
    run: str
    epoch: Count
    session_id: str
    reason: str = "aborted"


# -- claims ----------------------------------------------------------------------------------------


class Claim(Mutation):
    """Take up to ``limit`` segments for a task, whole units at a time, under a lease."""

    verb: ClassVar[str] = "claim"
    run: str
    limit: Annotated[int, Bound(ge=1)]
    where: str | None = None
    task: str | None = None
    unit: Literal["session", "segment", "group"] = "session"
    group_size: Annotated[int, Bound(ge=1)] | None = None
    view: View = "lineage"
    order_by: str | None = None
    max_staleness: Annotated[int, Bound(ge=0)] | None = None
    on_stale: Literal["keep", "discard", "discard_group"] = "keep"
    lease_s: Annotated[float, Bound(gt=0, le=86400 * 30)] = 600.0
    wait_s: Seconds = 0.0
    like: str | None = None
    """Claim id (from a ref) whose segments to take for another task."""
    epoch: Count | None = None
    """The claimer's epoch: one from before a rewind is refused. None: whichever is current."""


class AttachClaim(Mutation):
    """Join a claim as one rank of ``world``."""

    verb: ClassVar[str] = "attach_claim"
    run: str
    claim_id: Hex128
    rank: Annotated[int, Bound(ge=0)]
    world: Annotated[int, Bound(ge=1)]
    epoch: Count | None = None


class ClaimInfo(Wire):
    """Reply to ``Claim`` and ``AttachClaim``; blob 0 is the segments' table as an Arrow IPC stream."""

    claim_id: Hex128
    run: str
    task: str
    view: View
    segments: int
    lease_s: float


class RenewClaim(Mutation):
    verb: ClassVar[str] = "renew_claim"
    run: str
    claim_id: Hex128


class ReleaseClaim(Mutation):
    """One rank is done with the whole batch. Idempotent. ``rank=None``: the claimer, for all."""

    verb: ClassVar[str] = "release_claim"
    run: str
    claim_id: Hex128
    rank: int | None = None
    world: int | None = None


# -- segments --------------------------------------------------------------------------------------


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


class GetSession(Command):
    """A session as it was written, with a page of its steps from ``first_step`` on: for an export."""

    verb: ClassVar[str] = "get_session"
    run: str
    session_id: str
    first_step: Count = 0


class FinalizedView(Wire):
    """How a session was finalized in one view."""

    view: View
    reward: float | None
    columns: Json


class RecordedStep(Wire):
    """A step that counts; ``parent`` is empty for one that begins a tree. As in ``StepCommit``."""

    step_id: str
    parent: str
    messages: Json
    version: str | None
    sampled: tuple[Count, Count] | None
    receipts: list[Receipt]
    tools: str | None
    retry_of: str | None
    extends: bool
    blobs: list[StepBlob] = Bound(default_factory=list)


class SessionRecord(Wire):
    """A session; ``versions`` are those of its run, in their order; ``next_step`` is None at the end."""

    session_id: str
    group: str | None
    status: str
    tasks: Names
    columns: Json
    views: list[FinalizedView]
    versions: Names
    steps: list[RecordedStep]
    next_step: Count | None


class GetClaim(Command):
    """A claim and its segments' table (blob 0), without joining it; also one that was released."""

    verb: ClassVar[str] = "get_claim"
    run: str
    claim_id: Hex128


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


class Done(Wire):
    """Reply of commands that only change something: how many rows they touched."""

    count: int = 0


# -- checkpoints -----------------------------------------------------------------------------------


class Mark(Mutation):
    """The trainer saved a checkpoint: what is released from here on is kept for a rewind to it.

    Idempotent by name. What earlier marks kept is freed.
    """

    verb: ClassVar[str] = "mark"
    run: str
    epoch: Count
    name: str


class MarkInfo(Wire):
    """A mark of a run.

    ``status`` is live, spent or rewound, as in the table ``marks``; ``freed`` counts the pairs of segment and
    task that earlier marks had kept and this one freed.
    """

    run: str
    name: str
    epoch: Count
    policy_version: str | None = None
    status: str = "live"
    freed: int = 0


class Rewind(Mutation):
    """The trainer restored a checkpoint: all that was claimed or released since its mark is open again.

    The run's epoch advances, so that writers and claimers from before are refused.
    """

    verb: ClassVar[str] = "rewind"
    run: str
    epoch: Count
    name: str


class LostSession(Wire):
    """A session to generate again, under another id; ``reason`` says how it ended."""

    session_id: str
    group: str | None
    reason: str


class Rewound(Wire):
    """What a rewind did."""

    run: str
    name: str
    epoch: Count
    """The new epoch; whoever goes on joins it."""
    policy_version: str | None
    """As it was at the mark; it is the run's policy version again."""
    segments: Names
    """Claimable again, in the order of finalizing: those released since, and those under a claim."""
    sessions: list[LostSession]
    """In flight when the run was rewound (reason ``rewound``), or ended untrained since the mark."""


# -- bundles ---------------------------------------------------------------------------------------


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


# -- the store -------------------------------------------------------------------------------------


class GetPressure(Command):
    verb: ClassVar[str] = "pressure"


class Pressure(Wire):
    """How full the store is; producers hold back by it."""

    capacity_bytes: int
    used_bytes: int
    fill: float
    """used / capacity, 0 to 1."""
    soft_mark: float
    """Above this fill only work that is already open gets room."""
    oldest_unclaimed_s: float
    """Age of the oldest finalized segment that some task has not claimed; 0 where there is none."""
    open_sessions: int
    unclaimed_segments: int
    waiters: int
    """Callers that wait for room or for segments."""


class GetStats(Command):
    verb: ClassVar[str] = "stats"


class Stats(Wire):
    """Counters and gauges by name, as ``/metrics`` shows them; ``{label}`` parts are in the name."""

    values: dict[str, float]


class RunQuery(Command):
    """SQL over the metadata; the reply's blob 0 is an Arrow IPC stream. ``run=None``: every run."""

    verb: ClassVar[str] = "sql"
    query: str
    run: str | None = None


# -- on the same host ------------------------------------------------------------------------------


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


AnyCommand = (
    OpenRun | AddField | SetPolicyVersion | CloseGroup | OpenSession | CommitSteps | DropChunks | AbandonStep
    | FinalizeSession | AbortSession | Claim | AttachClaim | RenewClaim | ReleaseClaim | GetSegments
    | FindBlob | ListSegments | GetSession | GetClaim | UpdateSegments | PutValues | Discard | Mark | Rewind
    | GetPressure | GetStats | RunQuery
    | FindHost | LocateChunks | GrantExtent | AdoptChunks | KeepGrants | EndGrants
    | OpenBundleRun | CommitBundle | OpenBundle | CloseBundle | DeleteBundle
)  # fmt: skip


class Empty(Wire):
    """Reply whose content is its blobs."""


REPLIES: dict[type[Command], type[Wire]] = {
    OpenRun: RunInfo,
    AddField: RunInfo,
    SetPolicyVersion: Done,
    CloseGroup: Done,
    OpenSession: SessionInfo,
    CommitSteps: StepResults,
    DropChunks: Done,
    KeepChunks: Done,
    AbandonStep: Done,
    FindBlob: BlobInfo,
    FinalizeSession: SegmentInfos,
    AbortSession: Done,
    Claim: ClaimInfo,
    AttachClaim: ClaimInfo,
    RenewClaim: Done,
    ReleaseClaim: Done,
    GetSegments: Empty,
    ListSegments: Empty,
    GetSession: SessionRecord,
    GetClaim: ClaimInfo,
    UpdateSegments: Done,
    PutValues: Done,
    Discard: Done,
    Mark: MarkInfo,
    Rewind: Rewound,
    GetPressure: Pressure,
    GetStats: Stats,
    RunQuery: Empty,
    FindHost: HostInfo,
    LocateChunks: ChunkLocations,
    GrantExtent: ExtentGrant,
    AdoptChunks: ChunkVerdicts,
    KeepGrants: GrantsKept,
    EndGrants: Done,
    GetRun: RunInfo,
    GetCluster: ClusterMap,
    JoinCluster: Joined,
    Beat: News,
    ChunkStates: States,
    ConfirmChunks: Confirmed,
    FetchChunks: Confirmed,
    DigestChunks: Digest,
    TendChunks: Done,
    OpenBundleRun: RunInfo,
    CommitBundle: Done,
    OpenBundle: BundleInfo,
    CloseBundle: Done,
    DeleteBundle: Done,
}
COMMANDS: dict[str, type[Command]] = {command.verb: command for command in REPLIES}


class Reply(BaseModel):
    """A reply: its body and binary attachments (Arrow IPC streams, manifests)."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    body: Wire
    blobs: Sequence[bytes] = ()


def parse_command(verb: str, body: bytes) -> Command:
    """The command that a Flight action carries.

    Raises:
        MalformedMessage: unknown verb, or a body that does not fit it; names key and value.
    """
    kind = COMMANDS.get(verb)
    if kind is None:
        raise MalformedMessage(f"unknown action {verb!r}: expected one of {', '.join(COMMANDS)}")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise MalformedMessage(f"action {verb}: {explain(error)}") from None


def pack_reply(reply: Reply) -> bytes:
    """u32 length of a JSON head, the head (``body`` and blob lengths), then the blobs."""
    sizes = [len(blob) for blob in reply.blobs]
    head = json.dumps({"body": reply.body.model_dump(mode="json"), "blobs": sizes}).encode()
    return b"".join([struct.pack("<I", len(head)), head, *reply.blobs])


def unpack_reply(command: Command, raw: bytes) -> Reply:
    """The reply to ``command`` from ``pack_reply``'s bytes."""
    try:
        (length,) = struct.unpack_from("<I", raw)
        head = json.loads(raw[4 : 4 + length])
        body = REPLIES[type(command)].model_validate(head["body"])
        blobs, place = [], 4 + length
        for size in head["blobs"]:
            if not isinstance(size, int) or size < 0:
                raise ValueError(f"a blob of {size!r} bytes")
            blobs.append(raw[place : place + size])
            place += size
        if place != len(raw):
            raise ValueError(f"{len(raw)} bytes, expected {place}")
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ArrowTQError):
            raise
        raise MalformedMessage(f"reply to {command.verb}: {error}") from None
    return Reply(body=body, blobs=blobs)
