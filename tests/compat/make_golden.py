"""Make the golden bytes of every contract anew: ``python tests/compat/make_golden.py``.

Run it when a contract changes on purpose, and say in the changelog what changed: whatever was written
with the old bytes is then no longer read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from arrow_tq.backend import Fill
from arrow_tq.bundles import pack, plan_fields
from arrow_tq_schemas import cluster, commands, handles, presets, tickets
from arrow_tq_schemas.blobs import BLOB_FIELD, BlobRef, StepBlob
from arrow_tq_schemas.bundles import BundleRef
from arrow_tq_schemas.chunks import METADATA_KEY, Chunk, ChunkHeader, checksum
from arrow_tq_schemas.commands import Command, Reply, StepCommit, TaskSpec, pack_reply
from arrow_tq_schemas.errors import Misaligned, error_types
from arrow_tq_schemas.fields import Field, Task
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.locations import LOCATION_DTYPE, pack_ids
from arrow_tq_schemas.manifests import OWNED_DTYPE, Manifest, ranges
from arrow_tq_schemas.names import segment_id
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.spans import Span, to_spans
from arrow_tq_schemas.tables import TABLES

FOLDER = Path(__file__).parents[2] / "schemas" / "golden"
FIRST = ChunkId.make(0x0197A0B1C2D3, 0x2A5, 0, 0x15555_55555_5555)
SECOND = ChunkId.make(0x0197A0B1C2D4, 0x2A5, 0, 0x15555_55555_5556)
REQUEST = "00112233445566778899aabbccddeeff"
CLAIM = "ffeeddccbbaa99887766554433221100"
BLOB = "0123456789abcdef" * 4
EXPERTS = presets.routed_experts(layer_ids=[1, 2, 5], topk=2, num_experts=64, layer_groups=[[1], [2, 5]])
SERVER = cluster.ShardServer(url="grpc://node-3:8815", host="7f1c2a3b")
SPANS = to_spans([Span(0, FIRST, 0, 3), Span(3, SECOND, 1, 2), Span(9, SECOND, 7, 1 << 20)])

PACKED_SPANS = "eAFjYICApU2XD21cMJ0xFAxEG0CizFAMYi9tugKWD4PKMwLFmICYEyQJBOjy7GBRAQYAPwAV1g=="
"""``SPANS`` as packed once: zlib may pack them otherwise tomorrow, and must then still read this."""


def fields() -> dict[str, Field]:
    return {
        "token_ids": presets.token_ids(),
        "logprobs": presets.logprobs(),
        "loss_mask": presets.loss_mask(),
        "routed_experts": EXPERTS,
        "indexer_topk": presets.indexer_topk(layers=2, topk=4),
        "values": Field("values", "bfloat16", fill=0.5),
    }


def chunk() -> tuple[Field, Chunk]:
    """Three rows of layer group 1, the middle one null."""
    values = np.array([[[1, 2], [3, 4]], [[0, 0], [0, 0]], [[63, 62], [61, 60]]], np.uint8)
    valid = np.array([True, False, True])
    chunk_id = FIRST.sibling(1)
    digest = checksum(chunk_id, "qwen3-grpo", 2, EXPERTS.name, 1000, values, valid)
    header = ChunkHeader(
        id=chunk_id.hex, run="qwen3-grpo", epoch=2, field=EXPERTS.name, start=1000, rows=3, checksum=digest
    )
    return EXPERTS, Chunk(header, values, valid)


def checksums() -> dict[str, str]:
    """Arrays as ``dtype[shape]``, counted up from 0, null where the case says so."""
    found = {}
    for dtype in ("uint8", "<u2", "<i4", "<i8", "<f2", "<f4", "<f8"):
        for shape in ((1,), (9,), (9, 2), (3, 2, 4), (300, 40)):
            values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
            for label, valid in (("", None), (" every third row null", np.arange(shape[0]) % 3 != 0)):
                stored = values.copy()
                if valid is not None:
                    stored[~valid] = 0
                found[f"{dtype}{list(shape)}{label}"] = checksum(FIRST, "run", 7, "näme", 5, stored, valid)
    return found


def arrow_stream() -> bytes:
    field, value = chunk()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, field.arrow_schema(1)) as writer:
        writer.write_batch(value.to_batch(field), custom_metadata={METADATA_KEY: value.header.to_bytes()})
    return bytes(sink.getvalue())


def receipt() -> Receipt:
    chunks = [
        StoredChunk(id=FIRST.hex, start=1000, rows=3, bytes=18, groups=2, valid=[(0, 1), (2, 3)]),
        StoredChunk(id=SECOND.hex, start=1003, rows=5, bytes=30, groups=2),
    ]
    return Receipt(run="qwen3-grpo", epoch=2, field=EXPERTS.name, start=1000, rows=8, chunks=chunks)


def blob() -> StepBlob:
    """A file of eight bytes that its step stored."""
    chunk = StoredChunk(id=FIRST.hex, start=0, rows=8, bytes=8)
    stored = Receipt(run="r", epoch=2, field=BLOB_FIELD.name, start=0, rows=8, chunks=[chunk])
    return StepBlob(blob_id=BLOB, media_type="image/png", bytes=8, receipt=stored)


def blob_ref() -> BlobRef:
    return BlobRef(run="r", blob_id=BLOB, media_type="image/png", bytes=8)


def manifest() -> Manifest:
    owned = [(chunk_id.value >> 64, chunk_id.value & (1 << 64) - 1) for chunk_id in (FIRST, SECOND)]
    return Manifest(
        segment_id("s-17", "lineage", 0),
        (1 << 20) + 9,
        {"token_ids": SPANS, "logprobs": SPANS[1:2], "routed_experts": SPANS[:0]},
        ranges([[3, 5], [9, 1000]]),
        ranges([[9, 1000]]),
        np.array(owned, OWNED_DTYPE),
    )


def all_handles() -> bytes:
    rows = [
        handles.expand(SPANS[:2]),
        handles.constant(handles.Kind.FILL, 1),
        handles.constant(handles.Kind.HOLE, 1),
    ]
    return np.concatenate(rows).astype("<i4").tobytes()


def all_tickets() -> dict[str, tickets.PutDescriptor | tickets.Ticket]:
    return {
        "PutStream": tickets.PutStream(run="r", field="routed_experts", group=1),
        "CommitStream": tickets.CommitStream(),
        "SpanTicket": tickets.SpanTicket(
            run="r", field="routed_experts", group=1, layers=[1, 0], spans=PACKED_SPANS, wait_s=1.5
        ),
        "SegmentTicket": tickets.SegmentTicket(
            run="r", field="logprobs", segment_ids=["s-17~0", "s-18~t1"], start=4, end=9
        ),
        "ShardTicket": tickets.ShardTicket(
            shard=3,
            fills=True,
            segments=tickets.SegmentTicket(run="r", field="logprobs", segment_ids=["s-17~0"]),
        ),
        "SqlTicket": tickets.SqlTicket(query="SELECT 1", run="r"),
    }


def flight_messages() -> dict[str, tickets._Wire]:
    return {
        "FlightQuery": tickets.FlightQuery(run="r", field="logprobs", where="reward > 0"),
        "FlightFilter": tickets.FlightFilter(run="r"),
        "PutMessage": tickets.PutMessage(header=chunk()[1].header.to_bytes().decode(), ack=True),
        "PutAck": tickets.PutAck(stored=3, errors={FIRST.hex: Misaligned("here", position=3).to_wire()}),
    }


def all_commands() -> list[Command]:
    """Every command, each with values that differ from its defaults."""
    key, owner = {"request_id": REQUEST, "run": "r"}, {"request_id": REQUEST, "run": "r", "epoch": 2}
    step = StepCommit(
        run="r", epoch=2, session_id="s-17", step_id="call-1", parent="call-0",
        messages='[{"role": "user", "content": "\\ud800"}]', version="12", sampled=(3, 9),
        receipts=[receipt()], tools="sha256:00ff", retry_of="call-1a", extends=True,
        blobs=[blob(), StepBlob(blob_id=BLOB, media_type="text/plain", bytes=3)],
    )  # fmt: skip
    declared = [field.to_json() for field in fields().values()]
    return [
        commands.OpenRun(
            **key, fields=declared, tasks=[TaskSpec(name="actor", fields=["logprobs"])],
            durability="disk", epoch=3,
        ),
        commands.AddField(**owner, field=Field("values", "float32").to_json()),
        commands.SetPolicyVersion(**owner, version="12"),
        commands.CloseGroup(**owner, group="prompt-3"),
        commands.OpenSession(
            **owner, session_id="s-17", group="prompt-3", tasks=[], ttl_s=60.0, columns='{"lr": 0.1}'
        ),
        commands.CommitSteps(steps=[step]),
        commands.DropChunks(**key, chunk_ids=[FIRST.hex]),
        commands.AbandonStep(**owner, session_id="s-17", step_id="call-1"),
        commands.KeepChunks(run="r", chunk_ids=[FIRST.hex, SECOND.hex]),
        commands.FindBlob(run="r", blob_id=BLOB, bytes=8),
        commands.FinalizeSession(
            **owner, session_id="s-17", view="timeline", reward=0.5, columns='{"ok": true}'
        ),
        commands.AbortSession(**owner, session_id="s-17", reason="too long"),
        commands.Claim(
            **key, limit=512, where="reward > 0", task="actor", unit="group", group_size=8, view="timeline",
            order_by="created_at", max_staleness=2, on_stale="discard", lease_s=60.0, wait_s=5.0, like=CLAIM,
            epoch=2,
        ),
        commands.AttachClaim(**key, claim_id=CLAIM, rank=1, world=8, epoch=2),
        commands.RenewClaim(**key, claim_id=CLAIM),
        commands.ReleaseClaim(**key, claim_id=CLAIM, rank=1, world=8),
        commands.GetSegments(run="r", ids=["s-17"], view="timeline", manifests=False),
        commands.ListSegments(run="r", where="reward > 0", view="timeline", limit=10),
        commands.GetSession(run="r", session_id="s-17", first_step=3),
        commands.GetClaim(run="r", claim_id=CLAIM),
        commands.UpdateSegments(**key, ids=["s-17"], view="timeline", columns='{"reward": 1.0}'),
        commands.PutValues(
            **owner, claim_id=CLAIM, field="routed_experts",
            values=[commands.LateValue(segment_id="s-17~0", receipts=[receipt()])],
        ),
        commands.Discard(**owner, ids=["s-17"], where=None, view="timeline", reason="stale"),
        commands.Mark(**owner, name="step-100"),
        commands.Rewind(**owner, name="step-100"),
        commands.GetPressure(),
        commands.GetStats(),
        commands.RunQuery(query="SELECT 1", run="r"),
        commands.FindHost(),
        commands.LocateChunks(run="r", field="logprobs", proof=REQUEST, chunk_ids=pack_ids([FIRST, SECOND])),
        commands.GrantExtent(run="r", field="logprobs", group=1, proof=REQUEST, size_bytes=1 << 22),
        commands.AdoptChunks(
            run="r", field="logprobs", proof=REQUEST, grant=CLAIM,
            chunks=[commands.AdoptedChunk(offset=512, header=chunk()[1].header.to_bytes().decode())],
        ),
        commands.KeepGrants(proof=REQUEST, grants=[CLAIM]),
        commands.EndGrants(proof=REQUEST, grants=[CLAIM]),
        commands.OpenBundleRun(**key),
        commands.CommitBundle(
            **owner, bundle_id=FIRST.hex, chunks=3, rows=16, bytes=4096, fields=["tokens"], metadata='{"a":1}'
        ),
        commands.OpenBundle(run="r", bundle_id=FIRST.hex, lease_s=60.0),
        commands.CloseBundle(run="r", lease_ids=["00ff"]),
        commands.DeleteBundle(**key, bundle_id=FIRST.hex),
        *cluster_commands(),
    ]  # fmt: skip


def cluster_commands() -> list[Command]:
    """What shards and their catalog say to each other."""
    to_shard = {"number": 3, "epoch": 2, "ids": [FIRST.hex]}
    return [
        cluster.GetRun(run="r"),
        cluster.GetCluster(),
        cluster.JoinCluster(
            node=CLAIM, server=SERVER, capacity_bytes=1 << 40, used_bytes=12, number=3, lock=REQUEST
        ),
        cluster.Beat(
            number=3,
            epoch=2,
            lock=REQUEST,
            used_bytes=12,
            capacity_bytes=1 << 40,
            catalog=CLAIM,
            done=7,
            wait_s=0.5,
        ),
        cluster.LeaveCluster(number=3, epoch=2, lock=REQUEST),
        cluster.ChunkStates(ids=[FIRST.hex], run="r"),
        cluster.ConfirmChunks(**to_shard, run="r"),
        cluster.FetchChunks(**to_shard),
        cluster.DigestChunks(**to_shard),
        cluster.TendChunks(**to_shard, run="r", keep=True),
    ]


def bundle() -> bytes:
    """A reference, and the structure and bytes of a small dict in all layouts that need no other library."""
    value: dict[object, object] = {
        "tokens": [np.arange(3, dtype=np.int32), np.arange(1, dtype=np.int32), None],
        "grid": [np.arange(4, dtype=">i2").reshape(2, 2)] * 3,
        "lists": [[1, 2], [], [3]],
        "wide": [[0.5], [-0.0], [1.5]],
        "rewards": [1.0, None, 0.25],
        "prompt": ["a", "\ud800", "\u00e4"],
        "ids": np.arange(3, dtype=np.uint8),
        "metadata": {"big": 1 << 9000, "t": (1, b"x"), 3: float("inf"), "~": np.float32(0.5)},
    }
    parts: list[str] = []

    def write(nbytes: int, fill: Fill) -> None:
        out = np.empty(nbytes, np.uint8)
        list(fill(out))
        parts.append(out.tobytes().hex())

    structure = pack(plan_fields(value, {}, {}), None, 256, write)
    ref = BundleRef.make("r", FIRST.hex, '{"a":1}')
    return pretty({"ref": ref, "structure": json.loads(structure.to_bytes()), "chunks": parts})


def replies() -> dict[str, commands.Wire]:
    return {
        "RunInfo": commands.RunInfo(
            run="r", fields=[Field("x", "int32").to_json()], tasks=[TaskSpec(name="actor")],
            durability="process", epoch=2, policy_version="12",
        ),
        "SessionInfo": commands.SessionInfo(
            session_id="s-17", group=None, status="open", last_step="call-1", ends={"token_ids": 9}
        ),
        "StepResults": commands.StepResults(
            results=[
                commands.StepResult(step_id="call-1", step_index=0),
                commands.StepResult(step_id="call-2", error=Misaligned("here", position=3).to_wire()),
            ]
        ),
        "BlobInfo": commands.BlobInfo(
            blob_id=BLOB, state="stored", media_type="image/png", bytes=8,
            chunks=[StoredChunk(id=FIRST.hex, start=0, rows=8, bytes=8)],
        ),
        "SegmentInfos": commands.SegmentInfos(
            segments=[
                commands.SegmentInfo(
                    segment_id="s-17~0", session_id="s-17", num_tokens=9, loss_tokens=6,
                    complete_fields=["token_ids"], finish_reason="end",
                )
            ]
        ),
        "ClaimInfo": commands.ClaimInfo(
            claim_id=CLAIM, run="r", task="actor", view="lineage", segments=3, lease_s=60.0
        ),
        "SessionRecord": commands.SessionRecord(
            session_id="s-17", group="g", status="finalized", tasks=["actor"], columns='{"lr": 0.1}',
            views=[commands.FinalizedView(view="lineage", reward=0.5, columns="{}")], versions=["12"],
            steps=[
                commands.RecordedStep(
                    step_id="call-1", parent="", messages="[]", version="12", sampled=(3, 9),
                    receipts=[receipt()], tools="sha256:00ff", retry_of=None, extends=True,
                    blobs=[StepBlob(blob_id="0f" * 32, media_type="image/png", bytes=9)],
                )
            ],
            next_step=2,
        ),
        "MarkInfo": commands.MarkInfo(
            run="r", name="step-100", epoch=2, policy_version="12", status="spent", freed=3
        ),
        "Rewound": commands.Rewound(
            run="r", name="step-100", epoch=3, policy_version="12", segments=["s-17~0"],
            sessions=[commands.LostSession(session_id="s-18", group="g", reason="rewound")],
        ),
        "Pressure": commands.Pressure(
            capacity_bytes=100, used_bytes=25, fill=0.25, soft_mark=0.75, oldest_unclaimed_s=1.5,
            open_sessions=1, unclaimed_segments=2, waiters=3,
        ),
        "BundleInfo": commands.BundleInfo(
            run="r", bundle_id=FIRST.hex, chunks=3, rows=16, bytes=4096, metadata='{"a":1}', lease_id="00ff"
        ),
        "Stats": commands.Stats(values={"chunks{run=r}": 3.0}),
        "HostInfo": commands.HostInfo(boot_id="1b2c", proof_path="/dev/shm/store/host.proof"),
        "ChunkLocations": commands.ChunkLocations(
            extents=[commands.ExtentPlace(token="00ff", path="/dev/shm/store/000000.arrows")]
        ),
        "ExtentGrant": commands.ExtentGrant(
            grant=CLAIM, path="/dev/shm/store/000000.arrows", size_bytes=1 << 22, used_bytes=512, lease_s=30.0
        ),
        "ChunkVerdicts": commands.ChunkVerdicts(errors=[None, Misaligned("here", position=3).to_wire()]),
        "GrantsKept": commands.GrantsKept(grants=[CLAIM]),
        "ClusterMap": cluster.ClusterMap(
            version=9, catalog=CLAIM, lease_s=5.0,
            shards=[
                cluster.ShardEntry(
                    number=3, epoch=2, servers=[SERVER], capacity_bytes=1 << 40, used_bytes=12, up=False,
                    takes_new=False,
                )
            ],
        ),
        "Joined": cluster.Joined(number=3, epoch=2, lease_s=5.0, fence_s=60.0, catalog=CLAIM),
        "News": cluster.News(
            last=9, attached=[FIRST.hex], released=[SECOND.hex], reconcile=True, more=True, catalog=CLAIM
        ),
        "States": cluster.States(states=["committed", "released", "held", None]),
        "Digest": cluster.Digest(sha256=BLOB),
        "Confirmed": cluster.Confirmed(
            chunks=[
                cluster.ConfirmedChunk(
                    run="r", epoch=2, field="logprobs", start=4, rows=5, checksum="0" * 32
                ),
                None,
            ],
            used_bytes=4096,
        ),
        "Done": commands.Done(count=3),
        "Empty": commands.Empty(),
    }  # fmt: skip


def stream_messages() -> dict[str, commands.Wire]:
    """What a commit stream carries: its message, and its answer."""
    owner = {"request_id": REQUEST, "run": "r", "epoch": 2, "session_id": "s-17"}
    chunk = commands.AdoptedChunk(offset=512, header="{}")
    adopt = commands.AdoptChunks(run="r", field="logprobs", proof="00ff", grant=CLAIM, chunks=[chunk])
    told = replies()
    failed = Misaligned("here", position=3).to_wire()
    return {
        "StreamMessage": commands.StreamMessage(
            adopts=[adopt],
            opens=[commands.OpenSession(**owner)],
            steps=[StepCommit(run="r", epoch=2, session_id="s-17", step_id="call-1")],
            finalizes=[commands.FinalizeSession(**owner)],
        ),
        "StreamAnswers": commands.StreamAnswers(
            results=[commands.StepResult(step_id="call-1", step_index=0)],
            answers=[
                commands.stream_answer(told["ChunkVerdicts"]),
                commands.stream_answer(told["SessionInfo"]),
                commands.stream_answer(told["SegmentInfos"]),
                commands.StreamAnswer(error=failed),
            ],
        ),
    }


def golden() -> dict[str, bytes]:
    """Every golden file by its name."""
    head, columns = manifest().parts()
    reply = Reply(body=commands.Done(count=2), blobs=[b"one", b"", b"three"])
    return {
        "chunk_id.txt": lines([FIRST.hex, FIRST.sibling(255).hex, SECOND.hex]),
        "chunk_header.json": chunk()[1].header.to_bytes() + b"\n",
        "checksums.json": pretty(checksums()),
        "chunk.arrows": arrow_stream(),
        "receipt.json": receipt().to_json().encode() + b"\n",
        "blob_ref.json": blob_ref().to_json().encode() + b"\n",
        "manifest.head.json": head + b"\n",
        "manifest.columns.bin": columns,
        "handles.bin": all_handles(),
        "tickets.json": wires({**all_tickets(), **flight_messages()}),
        "commands.json": wires({command.verb: command for command in all_commands()}),
        "replies.json": wires(replies()),
        "reply.bin": pack_reply(reply),
        "stream.json": wires(stream_messages()),
        "location_dtype.json": pretty([list(one) for one in LOCATION_DTYPE.descr]),
        "bundle.json": bundle(),
        "fields.json": pretty({name: field.to_json() for name, field in fields().items()}),
        "tasks.json": pretty([Task("actor").to_json(), Task("critic", ("logprobs",)).to_json()]),
        "arrow_schemas.txt": schemas({name: field.arrow_schema() for name, field in fields().items()}),
        "tables.txt": schemas(TABLES),
        "errors.json": pretty(error_codes()),
        "error.json": pretty(Misaligned("token 3 differs", position=3).to_wire()),
    }


def error_codes() -> dict[str, dict[str, object]]:
    return {
        code: {
            "class": kind.__name__,
            "bases": [base.__name__ for base in kind.__bases__],
            "retryable": kind.retryable,
        }
        for code, kind in sorted(error_types().items())
    }


def schemas(tables: dict[str, pa.Schema]) -> bytes:
    """As text, metadata and nullability included."""
    shown = []
    for name, schema in tables.items():
        shown.append(f"{name}:")
        for column in schema:
            metadata = {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}
            null = "" if column.nullable else " not null"
            shown.append(
                f"  {column.name}: {column.type}{null} {json.dumps(metadata) if metadata else ''}".rstrip()
            )
    return lines(shown)


def wires(values: dict[str, object]) -> bytes:
    """One message a line, as it travels."""
    return lines([f"{name} {value.model_dump_json()}" for name, value in values.items()])  # type: ignore[attr-defined]


def pretty(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def lines(values: list[str]) -> bytes:
    return "".join(f"{value}\n" for value in values).encode()


def encoded_manifest() -> bytes:
    """Written once: zlib may pack it otherwise tomorrow, and must then still read this."""
    return manifest().encode()


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for name, raw in {**golden(), "manifest.bin": encoded_manifest()}.items():
        (FOLDER / name).write_bytes(raw)
        print(f"{len(raw):8} {name}")


if __name__ == "__main__":
    main()
