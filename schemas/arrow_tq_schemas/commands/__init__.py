"""What a client asks of a store: one frozen model a command, one a reply.

In process a command object is handed over as it is. Over Flight it is a DoAction whose type is the
command's ``verb`` and whose body is its JSON; the reply is one Result: ``pack_reply``. Step commits
travel on a DoPut stream instead, many a message (``CommitSteps``).

Every command that changes something has a ``request_id`` made by the client. The store keeps the reply
under it, so a retried call is answered and not applied again.
"""

from arrow_tq_schemas.command_base import Command, Mutation, Seconds, Wire, new_request_id
from arrow_tq_schemas.commands.bundles import (
    BUNDLE_METADATA_BYTES_MAX,
    BundleInfo,
    CloseBundle,
    CommitBundle,
    DeleteBundle,
    OpenBundle,
    OpenBundleRun,
)
from arrow_tq_schemas.commands.chunks import BlobInfo, DropChunks, FindBlob, KeepChunks
from arrow_tq_schemas.commands.claims import AttachClaim, Claim, ClaimInfo, GetClaim, ReleaseClaim, RenewClaim
from arrow_tq_schemas.commands.marks import LostSession, Mark, MarkInfo, Rewind, Rewound
from arrow_tq_schemas.commands.registry import (
    COMMANDS,
    REPLIES,
    Reply,
    pack_reply,
    parse_command,
    unpack_reply,
)
from arrow_tq_schemas.commands.runs import AddField, CloseGroup, OpenRun, RunInfo, SetPolicyVersion, TaskSpec
from arrow_tq_schemas.commands.samehost import (
    AdoptChunks,
    AdoptedChunk,
    ChunkLocations,
    ChunkVerdicts,
    EndGrants,
    ExtentGrant,
    ExtentPlace,
    FindHost,
    GrantExtent,
    GrantsKept,
    HostInfo,
    KeepGrants,
    LocateChunks,
)
from arrow_tq_schemas.commands.segments import (
    Discard,
    GetSegments,
    LateValue,
    ListSegments,
    PutValues,
    UpdateSegments,
)
from arrow_tq_schemas.commands.sessions import (
    AbortSession,
    FinalizedView,
    FinalizeSession,
    GetSession,
    OpenSession,
    RecordedStep,
    SegmentInfo,
    SegmentInfos,
    SessionInfo,
    SessionRecord,
)
from arrow_tq_schemas.commands.steps import AbandonStep, CommitSteps, StepCommit, StepResult, StepResults
from arrow_tq_schemas.commands.store import Done, Empty, GetPressure, GetStats, Pressure, RunQuery, Stats
from arrow_tq_schemas.commands.streams import (
    StreamAnswer,
    StreamAnswers,
    Streamed,
    StreamMessage,
    stream_answer,
)
from arrow_tq_schemas.commands.terms import Durability, Json, Names, View

__all__ = [
    "AbandonStep",
    "AbortSession",
    "AddField",
    "AdoptChunks",
    "AdoptedChunk",
    "AttachClaim",
    "BUNDLE_METADATA_BYTES_MAX",
    "BlobInfo",
    "BundleInfo",
    "COMMANDS",
    "ChunkLocations",
    "ChunkVerdicts",
    "Claim",
    "ClaimInfo",
    "CloseBundle",
    "CloseGroup",
    "Command",
    "CommitBundle",
    "CommitSteps",
    "DeleteBundle",
    "Discard",
    "Done",
    "DropChunks",
    "Durability",
    "Empty",
    "EndGrants",
    "ExtentGrant",
    "ExtentPlace",
    "FinalizeSession",
    "FinalizedView",
    "FindBlob",
    "FindHost",
    "GetClaim",
    "GetPressure",
    "GetSegments",
    "GetSession",
    "GetStats",
    "GrantExtent",
    "GrantsKept",
    "HostInfo",
    "Json",
    "KeepChunks",
    "KeepGrants",
    "LateValue",
    "ListSegments",
    "LocateChunks",
    "LostSession",
    "Mark",
    "MarkInfo",
    "Mutation",
    "Names",
    "OpenBundle",
    "OpenBundleRun",
    "OpenRun",
    "OpenSession",
    "Pressure",
    "PutValues",
    "REPLIES",
    "RecordedStep",
    "ReleaseClaim",
    "RenewClaim",
    "Reply",
    "Rewind",
    "Rewound",
    "RunInfo",
    "RunQuery",
    "Seconds",
    "SegmentInfo",
    "SegmentInfos",
    "SessionInfo",
    "SessionRecord",
    "SetPolicyVersion",
    "Stats",
    "StepCommit",
    "StepResult",
    "StepResults",
    "TaskSpec",
    "UpdateSegments",
    "View",
    "Wire",
    "StreamAnswer",
    "StreamAnswers",
    "StreamMessage",
    "Streamed",
    "new_request_id",
    "stream_answer",
    "pack_reply",
    "parse_command",
    "unpack_reply",
]
