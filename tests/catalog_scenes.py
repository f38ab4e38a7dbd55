"""What the catalog's tests share: a shard of headers alone, and short ways to fill a catalog."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from arrow_tq.calls import read_table
from arrow_tq.store.catalog import Catalog, CatalogConfig
from arrow_tq_schemas import presets
from arrow_tq_schemas.blobs import BLOB_FIELD, StepBlob, blob_id
from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.commands import (
    Claim,
    ClaimInfo,
    FinalizeSession,
    GetSegments,
    OpenRun,
    OpenSession,
    RunInfo,
    SegmentInfo,
    SegmentInfos,
    SessionInfo,
    StepCommit,
    StepResult,
    TaskSpec,
)
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId, IdFactory
from arrow_tq_schemas.receipts import Receipt, StoredChunk, chunk_ids

FIELDS = (
    presets.token_ids(),
    presets.logprobs(),
    presets.routed_experts(4, 2, 64, layer_groups=[[0, 1], [2, 3]]),
)


class Pins:
    """Chunk headers and pins in memory, as a shard would have them."""

    def __init__(self) -> None:
        self.headers: dict[ChunkId, ChunkHeader] = {}
        self.pinned: set[ChunkId] = set()
        self.contents: dict[ChunkId, bytes] = {}
        self._lock = threading.Lock()

    def pin(self, ids: Sequence[ChunkId]) -> list[ChunkId]:
        with self._lock:
            missing = [one for one in ids if one not in self.headers]
            if not missing:
                self.pinned.update(ids)
            return missing

    def unpin(self, ids: Sequence[ChunkId]) -> None:
        with self._lock:
            self.pinned.difference_update(ids)

    def header(self, chunk_id: ChunkId) -> ChunkHeader | None:
        return self.headers.get(chunk_id)

    def holds(self, chunk_id: ChunkId) -> bool:
        return chunk_id in self.headers

    def sha256(self, ids: Sequence[ChunkId]) -> str:
        return blob_id(b"".join(self.contents[one] for one in ids))


class Scene:
    """A catalog with its pins, and what it released."""

    def __init__(self, path: Path, **settings: float) -> None:
        self.pins = Pins()
        self.released: list[ChunkId] = []
        self.path = path
        self.ids = IdFactory()
        self.catalog = self.open(**settings)

    def open(self, **settings: float) -> Catalog:
        return Catalog(CatalogConfig(path=self.path, **settings), self.pins, self.released.extend)

    def reopen(self, **settings: float) -> None:
        self.catalog.close()
        self.catalog = self.open(**settings)

    def run(
        self,
        name: str = "demo",
        tasks: Sequence[TaskSpec] | None = None,
        fields: Sequence[Field] = FIELDS,
        epoch: int | None = None,
    ) -> RunInfo:
        declared = [field.to_json() for field in fields]
        command = OpenRun(
            run=name, fields=declared, tasks=None if tasks is None else list(tasks), epoch=epoch
        )
        body = self.catalog.execute(command).body
        assert isinstance(body, RunInfo)
        return body

    def session(
        self,
        session_id: str,
        group: str | None = None,
        tasks: list[str] | None = None,
        ttl_s: float | None = None,
        epoch: int = 0,
        **columns: object,
    ) -> SessionInfo:
        command = OpenSession(
            run="demo",
            epoch=epoch,
            session_id=session_id,
            group=group,
            tasks=tasks,
            ttl_s=ttl_s,
            columns=json.dumps(columns),
        )
        body = self.catalog.execute(command).body
        assert isinstance(body, SessionInfo)
        return body

    def receipt(
        self, field: str = "token_ids", start: int = 0, rows: int = 4, epoch: int = 0, run: str = "demo"
    ) -> Receipt:
        """Rows as if a shard had stored them: one chunk, with every layer group."""
        groups = len(next(one for one in FIELDS if one.name == field).groups)
        chunk_id = self.ids.next(0)
        for group in range(groups):
            one = chunk_id.sibling(group)
            self.pins.headers[one] = ChunkHeader(
                id=one.hex, run=run, epoch=epoch, field=field, start=start, rows=rows, checksum="0" * 32
            )
        chunk = StoredChunk(id=chunk_id.hex, start=start, rows=rows, bytes=rows, groups=groups)
        return Receipt(run=run, epoch=epoch, field=field, start=start, rows=rows, chunks=[chunk])

    def blob(self, content: bytes, brought: bool = True, media_type: str = "image/png") -> StepBlob:
        """A reference to a blob, with its bytes in one chunk as if a shard had stored them, or without."""
        receipt = None
        if brought:
            chunk_id, size = self.ids.next(0), len(content)
            self.pins.headers[chunk_id] = ChunkHeader(
                id=chunk_id.hex,
                run="demo",
                epoch=0,
                field=BLOB_FIELD.name,
                start=0,
                rows=size,
                checksum="0" * 32,
            )
            self.pins.contents[chunk_id] = content
            chunk = StoredChunk(id=chunk_id.hex, start=0, rows=size, bytes=size)
            receipt = Receipt(run="demo", epoch=0, field=BLOB_FIELD.name, start=0, rows=size, chunks=[chunk])
        return StepBlob(blob_id=blob_id(content), media_type=media_type, bytes=len(content), receipt=receipt)

    def step(
        self, session_id: str, step_id: str, *receipts: Receipt, epoch: int = 0, **more: object
    ) -> StepCommit:
        record = {"run": "demo", "epoch": epoch, "session_id": session_id, "step_id": step_id, **more}
        return StepCommit.model_validate({**record, "receipts": list(receipts)})

    def commit(self, step: StepCommit, rewrite_at: int | None = None) -> StepResult:
        key = (step.run, step.session_id, step.step_id)
        (result,) = self.catalog.commit_steps([step], {} if rewrite_at is None else {key: rewrite_at})
        result.check()
        return result

    def finalize(self, session_id: str, reward: float | None = None, **columns: object) -> list[SegmentInfo]:
        command = FinalizeSession(
            run="demo", epoch=0, session_id=session_id, reward=reward, columns=json.dumps(columns)
        )
        body = self.catalog.execute(command).body
        assert isinstance(body, SegmentInfos)
        return body.segments

    def fill(
        self,
        session_id: str,
        segments: int = 1,
        reward: float | None = None,
        version: str | None = None,
        **more: object,
    ) -> list[ChunkId]:
        """A finalized session of this many segments (each rewrites all); the ids of its chunks."""
        self.session(session_id, **more)  # type: ignore[arg-type]
        ids = []
        for index in range(segments):
            receipts = [self.receipt("token_ids", 0, 4), self.receipt("routed_experts", 0, 3)]
            step = self.step(session_id, f"step-{index}", *receipts, sampled=(1, 4), version=version)
            self.commit(step, rewrite_at=0 if index else None)
            ids += chunk_ids(receipts)
        assert len(self.finalize(session_id, reward)) == segments
        return ids

    def claim(self, limit: int = 100, **wishes: object) -> tuple[ClaimInfo, list[str]]:
        """A claim and the ids of its segments, in order."""
        reply = self.catalog.execute(Claim.model_validate({"run": "demo", "limit": limit, **wishes}))
        assert isinstance(reply.body, ClaimInfo)
        names = read_table(reply.blobs[0]).column("segment_id").to_pylist()
        assert reply.body.segments == len(names)
        return reply.body, names

    def table(self, *ids: str) -> pa.Table:
        reply = self.catalog.execute(GetSegments(run="demo", ids=list(ids), manifests=False))
        return read_table(reply.blobs[0])

    def rows(self, table: str) -> list[dict[str, object]]:
        """Every row of a metadata table."""
        found: list[dict[str, object]] = self.catalog.changes(table, None, 0)[0].to_pylist()
        return found

    def states(self, ids: Sequence[ChunkId]) -> set[str | None]:
        return set(self.catalog.chunk_states(ids))
