"""Every command with its reply, and both as bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from arrow_tq_schemas.chunks import explain
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
    LeaveCluster,
    News,
    States,
    TendChunks,
)
from arrow_tq_schemas.command_base import Command, Wire
from arrow_tq_schemas.commands.bundles import (
    BundleInfo,
    CloseBundle,
    CommitBundle,
    DeleteBundle,
    OpenBundle,
    OpenBundleRun,
)
from arrow_tq_schemas.commands.chunks import BlobInfo, DropChunks, FindBlob, KeepChunks
from arrow_tq_schemas.commands.claims import AttachClaim, Claim, ClaimInfo, GetClaim, ReleaseClaim, RenewClaim
from arrow_tq_schemas.commands.marks import Mark, MarkInfo, Rewind, Rewound
from arrow_tq_schemas.commands.runs import AddField, CloseGroup, OpenRun, RunInfo, SetPolicyVersion
from arrow_tq_schemas.commands.samehost import (
    AdoptChunks,
    ChunkLocations,
    ChunkVerdicts,
    EndGrants,
    ExtentGrant,
    FindHost,
    GrantExtent,
    GrantsKept,
    HostInfo,
    KeepGrants,
    LocateChunks,
)
from arrow_tq_schemas.commands.segments import Discard, GetSegments, ListSegments, PutValues, UpdateSegments
from arrow_tq_schemas.commands.sessions import (
    AbortSession,
    FinalizeSession,
    GetSession,
    OpenSession,
    SegmentInfos,
    SessionInfo,
    SessionRecord,
)
from arrow_tq_schemas.commands.steps import AbandonStep, CommitSteps, StepResults
from arrow_tq_schemas.commands.store import Done, Empty, GetPressure, GetStats, Pressure, RunQuery, Stats
from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage

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
    LeaveCluster: Done,
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
