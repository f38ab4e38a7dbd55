"""``Run``: one training run, the namespace of its sessions, segments and claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.aio import Threads
from arrow_tq.backend import Backend
from arrow_tq.blobs import read_blob
from arrow_tq.calls import Ids, ask, checked, columns_json, read_table, segment_ids
from arrow_tq.producer.encode import CHUNK_BYTES, Encoder
from arrow_tq.producer.opening import Opening
from arrow_tq.producer.session import Session
from arrow_tq.trainer.batch import Batch
from arrow_tq.trainer.batches import Batches
from arrow_tq.trainer.claiming import take_batch
from arrow_tq.trainer.fetch import Reading
from arrow_tq.trainer.reference import BatchRef
from arrow_tq.trainer.resolve import resolve
from arrow_tq.trainer.tables import segment_table
from arrow_tq_schemas.blobs import BlobRef
from arrow_tq_schemas.commands import (
    AddField,
    AttachClaim,
    Claim,
    CloseGroup,
    Discard,
    Done,
    Mark,
    MarkInfo,
    OpenRun,
    Rewind,
    Rewound,
    RunInfo,
    RunQuery,
    SetPolicyVersion,
    UpdateSegments,
    View,
)
from arrow_tq_schemas.errors import NotFound
from arrow_tq_schemas.fields import Field, Task
from arrow_tq_schemas.ids import IdFactory
from arrow_tq_schemas.names import check_id


class Run:
    """One training run. Made by ``store.run``; thread-safe.

    Attributes:
        name: the run's name.
        epoch: the epoch that this writer joined.
        fields: the declared fields by name.
        tasks: the declared tasks by name.
        chunk_bytes: aimed size of one chunk; larger puts become several.
        put_timeout_s: how long a step waits for its rows to be stored.
        reading: bounds of fetches.
        batches: those that this process claimed or attached, and still has.
    """

    def __init__(self, backend: Backend, threads: Threads, info: RunInfo) -> None:
        self.backend = backend
        self.threads = threads
        self.ids = IdFactory()
        self.name = info.run
        self.epoch = info.epoch
        self.durability = info.durability
        self.fields: dict[str, Field] = {}
        self._learn(info)
        self.tasks = {
            spec.name: Task(spec.name, None if spec.fields is None else tuple(spec.fields))
            for spec in info.tasks
        }
        self.chunk_bytes = CHUNK_BYTES
        self.put_timeout_s = 120.0
        self._encoders: dict[str, Encoder] = {}
        self.reading = Reading()
        self.batches = Batches()

    def field(self, name: str) -> Field:
        """The declared field; raises ``NotFound`` naming those that exist."""
        found = self.fields.get(name)
        if found is None:
            # Another process may have added it since this run was opened.
            self._learn(ask(self.backend, OpenRun(run=self.name), RunInfo))
            found = self.fields.get(name)
        if found is None:
            known = ", ".join(self.fields)
            raise NotFound(f"run {self.name!r} has no field {name!r}; it has {known}", field=name)
        return found

    def encoder(self, field: Field) -> Encoder:
        """What turns arrays into this run's chunks of a field."""
        found = self._encoders.get(field.name)
        if found is None or found.chunk_bytes != self.chunk_bytes:
            found = self._encoders[field.name] = Encoder(field, self.name, self.epoch, self.chunk_bytes)
        return found

    # -- producers -----------------------------------------------------------------------------

    def session(
        self,
        id: str,
        group: str | None = None,
        tasks: Iterable[str] | None = None,
        ttl_s: float | None = None,
        wait_s: float = 0,
        **columns: object,
    ) -> Session:
        """Open a session, or open it again while it is open.

        One that is finalized opens too, by its id alone, for ``finalize`` of its other view; its ``status``
        says so, and it takes no steps.

        Args:
            id: the session's id, unique in the run for ever.
            group: the group it belongs to (the samples of one prompt).
            tasks: tasks that may claim it; None for all, ``()`` for none (evaluation).
            ttl_s: seconds after which it expires if it is unfinished, or has no tasks.
            wait_s: how long to wait for room in a full store before ``StoreFull``.
            columns: further columns of the session, inherited by its segments.

        Raises:
            SessionClosed: it was aborted or discarded, or it is finalized and more than its id is given.
            StoreFull: past the soft mark only sessions that are open already get room; retryable.
        """
        return Opening(self, id, group, tasks, ttl_s, columns).wait(wait_s)

    # -- trainers ------------------------------------------------------------------------------

    def claim(
        self,
        limit: int,
        where: str | None = None,
        task: str | None = None,
        unit: Literal["session", "segment", "group"] = "session",
        group_size: int | None = None,
        view: View = "lineage",
        order_by: str | None = None,
        max_staleness: int | None = None,
        on_stale: Literal["keep", "discard", "discard_group"] = "keep",
        lease_s: float = 600,
        wait_s: float = 0,
        like: str | None = None,
    ) -> Batch:
        """Take up to ``limit`` segments for a task, whole units at a time. Empty when nothing fits.

        Args:
            limit: number of segments at most.
            where: predicate over segment columns, such as ``"reward IS NOT NULL AND num_tokens < 4096"``.
            task: whose claim it is; may be left out where the run declares one task.
            unit: what is never split: a session's segments, one segment, or a group's sessions.
            group_size: finished sessions that make a group whole.
            view: which segments of a session.
            order_by: columns to take segments by; the order of finalizing when left out.
            max_staleness: policy versions that a segment's oldest token may be behind.
            on_stale: what becomes of segments staler than that.
            lease_s: seconds until the claim ends by itself; renewed in the background while the batch lives.
            wait_s: how long to wait for something to fit.
            like: a batch's ``ref``: take the same segments for another task.

        Raises:
            LimitTooSmall: the next unit alone has more than ``limit`` segments.
            InvalidQuery: ``where`` or ``order_by`` is refused.
        """
        with checked("claim"):
            command = Claim(
                run=self.name, limit=limit, where=where, task=task, unit=unit, group_size=group_size,
                view=view, order_by=order_by, max_staleness=max_staleness, on_stale=on_stale,
                lease_s=lease_s, wait_s=wait_s, epoch=self.epoch,
                like=None if like is None else BatchRef.parse(like, self.name).claim,
            )  # fmt: skip
        return take_batch(self, command)

    def attach(self, ref: str, rank: int, world: int) -> Batch:
        """Join a claim by its ``ref`` as one of ``world`` ranks; all see the same table."""
        claim_id = BatchRef.parse(ref, self.name).claim
        with checked("attach"):
            command = AttachClaim(run=self.name, claim_id=claim_id, rank=rank, world=world, epoch=self.epoch)
        return take_batch(self, command)

    def resolve(
        self,
        handles: object,
        field: str,
        layers: Sequence[int] | None = None,
        expect_tokens: object = None,
        out: object = None,
        valid: object = None,
    ) -> npt.NDArray[np.generic]:
        """The payload that handles stand for, ``[rows, *item]`` in their order; each chunk row is read once.

        Args:
            handles: ``[rows, 6]`` int32 or int64, numpy or torch, from ``batch.handles``, moved as you like.
            field: the field that they were made for.
            layers, out: as for ``batch.fetch``.
            expect_tokens: ``[rows]`` token ids, moved along: each row is compared with the token that it was
                stored for. Needs a batch of theirs claimed or attached in this process.
            valid: which rows are there: None for all, their number, or ``[rows]`` bool. An all-zero row among
                them is an error; others are padding and read as the field's fill.

        Raises:
            MalformedMessage: a row is no handle: two were added, or bits were lost.
            Misaligned: an all-zero row that should be there, or tokens differ.
            Hole, ChunkReleased, ChunkLost, ChunkPending: naming rows or chunks.
        """
        return resolve(self, handles, field, layers, expect_tokens, out, valid)

    def add_field(self, field: Field) -> None:
        """Declare one more field, which tasks that did not list theirs read. Idempotent.

        Raises:
            Conflict: the run has another field of that name.
        """
        command = AddField(run=self.name, epoch=self.epoch, field=field.to_json())
        self._learn(ask(self.backend, command, RunInfo))

    def update(self, ids: Ids, view: View = "lineage", **columns: object) -> int:
        """Set ``reward`` or other columns of segments after finalize; says how many rows changed."""
        with checked("update"):
            command = UpdateSegments(
                run=self.name, ids=segment_ids(ids), view=view, columns=columns_json(columns)
            )
        return ask(self.backend, command, Done).count

    def discard(
        self, ids: Ids | None = None, where: str | None = None, *, reason: str, view: View = "lineage"
    ) -> int:
        """Free what will never be trained. Rows stay, with the reason; says how many segments."""
        with checked("discard"):
            command = Discard(
                run=self.name,
                epoch=self.epoch,
                ids=None if ids is None else segment_ids(ids),
                where=where,
                view=view,
                reason=check_id(reason, "reason"),
            )
        return ask(self.backend, command, Done).count

    def close_group(self, id: str) -> None:
        """No further session will join this group."""
        ask(self.backend, CloseGroup(run=self.name, epoch=self.epoch, group=check_id(id, "group")), Done)

    def set_policy_version(self, version: str) -> None:
        """Tell which version the trainer now serves; staleness is counted in these."""
        command = SetPolicyVersion(run=self.name, epoch=self.epoch, version=check_id(version, "version"))
        ask(self.backend, command, Done)

    def mark(self, name: str) -> MarkInfo:
        """Tell that the trainer saved a checkpoint called ``name``. Idempotent by name.

        What is released from here on is kept, so that ``rewind(name)`` finds it again; what earlier marks
        kept is freed. Keeping is bounded: by the next mark, by the store's ``keep_released_s``, and by its
        room (docs/checkpoints.md). A run that is never marked keeps nothing.

        Raises:
            StaleEpoch: the run was rewound, or its epoch advanced, since this run was opened.
        """
        command = Mark(run=self.name, epoch=self.epoch, name=check_id(name, "mark"))
        return ask(self.backend, command, MarkInfo)

    def rewind(self, name: str) -> Rewound:
        """After the checkpoint ``name`` was restored: what was released or claimed since is claimable again.

        The run's epoch advances, and this run joins it: writers and claimers from before are refused, their
        claims are gone, and their open sessions are ended. Ids are never used twice: what is to be generated
        again (``sessions`` of the result) gets new ones.

        Raises:
            NotFound: the run has no such mark; names those it has.
            MarkSpent: what was released since is not kept any more; names why, and the marks that are left.
            StaleEpoch: somebody else rewound the run first.
        """
        command = Rewind(run=self.name, epoch=self.epoch, name=check_id(name, "mark"))
        rewound = ask(self.backend, command, Rewound)
        self.epoch = rewound.epoch
        return rewound

    # -- people --------------------------------------------------------------------------------

    def sql(self, query: str) -> pa.Table:
        """DuckDB SQL over this run's tables.

        These are: runs, sessions, steps, segments, spans, chunks, blobs, step_blobs, claims, marks.
        """
        return read_table(self.backend.execute(RunQuery(query=query, run=self.name)).blobs[0])

    def table(self, ids: Ids, fields: Sequence[str] | None = None, view: View = "lineage") -> pa.Table:
        """One row a segment: its metadata columns, and each field as a list column (all when None).

        Scalars are ``large_list<value>``; items with a shape are ``large_list<fixed_size_list>`` of the
        flattened item.
        """
        names = list(self.fields) if fields is None else list(fields)
        return segment_table(
            self.backend, self.name, [self.field(name) for name in names], segment_ids(ids), view
        )

    def blob(self, blob: BlobRef | str) -> bytes:
        """The content of a file that a step attached, by its reference (also as JSON) or its id.

        Raises:
            NotFound: no committed step of the run attached it.
            ChunkReleased, ChunkLost: it was let go with the last step that referred to it; it is damaged.
        """
        return read_blob(self.backend, self.name, blob)

    # -- awaitable twins -----------------------------------------------------------------------

    async def asession(
        self,
        id: str,
        group: str | None = None,
        tasks: Iterable[str] | None = None,
        ttl_s: float | None = None,
        wait_s: float = 0,
        **columns: object,
    ) -> Session:
        return await Opening(self, id, group, tasks, ttl_s, columns).await_room(wait_s)

    async def aclaim(
        self,
        limit: int,
        where: str | None = None,
        task: str | None = None,
        unit: Literal["session", "segment", "group"] = "session",
        group_size: int | None = None,
        view: View = "lineage",
        order_by: str | None = None,
        max_staleness: int | None = None,
        on_stale: Literal["keep", "discard", "discard_group"] = "keep",
        lease_s: float = 600,
        wait_s: float = 0,
        like: str | None = None,
    ) -> Batch:
        return await self.threads.call(
            self.claim,
            *(limit, where, task, unit, group_size, view, order_by, max_staleness, on_stale),
            lease_s=lease_s,
            wait_s=wait_s,
            like=like,
        )

    async def aattach(self, ref: str, rank: int, world: int) -> Batch:
        return await self.threads.call(self.attach, ref, rank, world)

    async def aresolve(
        self,
        handles: object,
        field: str,
        layers: Sequence[int] | None = None,
        expect_tokens: object = None,
        out: object = None,
        valid: object = None,
    ) -> npt.NDArray[np.generic]:
        return await self.threads.call(self.resolve, handles, field, layers, expect_tokens, out, valid)

    async def aadd_field(self, field: Field) -> None:
        await self.threads.call(self.add_field, field)

    async def aupdate(self, ids: Ids, view: View = "lineage", **columns: object) -> int:
        return await self.threads.call(self.update, ids, view, **columns)

    async def adiscard(
        self, ids: Ids | None = None, where: str | None = None, *, reason: str, view: View = "lineage"
    ) -> int:
        return await self.threads.call(self.discard, ids, where, reason=reason, view=view)

    async def aclose_group(self, id: str) -> None:
        await self.threads.call(self.close_group, id)

    async def aset_policy_version(self, version: str) -> None:
        await self.threads.call(self.set_policy_version, version)

    async def amark(self, name: str) -> MarkInfo:
        return await self.threads.call(self.mark, name)

    async def arewind(self, name: str) -> Rewound:
        return await self.threads.call(self.rewind, name)

    async def asql(self, query: str) -> pa.Table:
        return await self.threads.call(self.sql, query)

    async def atable(self, ids: Ids, fields: Sequence[str] | None = None, view: View = "lineage") -> pa.Table:
        return await self.threads.call(self.table, ids, fields, view)

    async def ablob(self, blob: BlobRef | str) -> bytes:
        return await self.threads.call(self.blob, blob)

    def __repr__(self) -> str:
        return f"Run({self.name!r}, epoch={self.epoch})"

    def _learn(self, info: RunInfo) -> None:
        self.fields.update((field.name, field) for field in map(Field.from_json, info.fields))
