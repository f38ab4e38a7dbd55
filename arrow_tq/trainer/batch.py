"""A claimed batch: metadata at once, payload when asked, released when done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.calls import ask
from arrow_tq.intervals import domain_ranges
from arrow_tq.trainer import segments
from arrow_tq.trainer.data import Data
from arrow_tq.trainer.fetch import check_tokens, chosen_layers, fetch, item_shape, token_field
from arrow_tq.trainer.handles import segment_handles
from arrow_tq.trainer.late import put_values
from arrow_tq.trainer.lease import LeaseKeeper
from arrow_tq.trainer.micro import MicroBatch as MicroBatch
from arrow_tq.trainer.packing import PlanPolicy, pack
from arrow_tq.trainer.plan import Plan
from arrow_tq.trainer.prefetch import AHEAD_BYTES, Prefetch
from arrow_tq.trainer.reference import BatchRef
from arrow_tq_schemas.commands import ClaimInfo, Done, ReleaseClaim
from arrow_tq_schemas.errors import ChunkReleased, InvalidInput
from arrow_tq_schemas.fields import TOKEN_FIELD, Field
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import empty_spans

if TYPE_CHECKING:
    from arrow_tq.runs import Run

Array = npt.NDArray[np.generic]


class Batch:
    """Segments that a task claimed. Made by ``run.claim`` and ``run.attach``.

    Attributes:
        run: the run.
        table: metadata of the segments, in claim order; no payload.
        task: whose claim it is.
        rank, world: set for an attached rank.
        segment_ids: ids of its segments, in the order of ``table``.
        num_tokens: ``[segments]`` int64, T of each.
    """

    def __init__(
        self, run: Run, info: ClaimInfo, table: pa.Table, rank: int | None, world: int | None
    ) -> None:
        self.run = run
        self.table = table
        self.task = info.task
        self.rank = rank
        self.world = world
        self.segment_ids: list[str] = table.column("segment_id").to_pylist()
        self.num_tokens: npt.NDArray[np.int64] = table.column("num_tokens").to_numpy()
        self._claim_id = info.claim_id
        self._manifests: dict[int, Manifest] = {}
        self._keeper: LeaseKeeper | None = None
        if self.segment_ids:
            self._keeper = LeaseKeeper(self, run.backend, run.name, info.claim_id, info.lease_s)

    @property
    def ref(self) -> str:
        """What to send to the other ranks: JSON, under 1 KB whatever the batch holds."""
        return BatchRef(run=self.run.name, task=self.task, claim=self._claim_id).to_json()

    def __len__(self) -> int:
        return len(self.segment_ids)

    def select(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> MicroBatch:
        """Some of the batch's rows, in the order given, as a framework's own schedule wants them."""
        return MicroBatch(self, self._rows(rows))

    def plan(
        self,
        max_tokens: int,
        seed: int | None = None,
        rows: Sequence[int] | npt.NDArray[np.integer] | None = None,
        rank: int | None = None,
        world: int | None = None,
        policy: PlanPolicy | None = None,
    ) -> Plan:
        """Split the batch among ranks, balanced by tokens, and pack each part into micro-batches.

        Every rank computes the same plan from the same table: nothing is said between them, and no payload
        is read. Each segment is in exactly one micro-batch of one rank; every rank has the same number of
        micro-batches; those with the same number have like sizes on all ranks.

        Args:
            max_tokens: tokens of one micro-batch at most.
            seed: shuffles segments and micro-batches, the same way everywhere; None keeps the batch's order.
            rows: rows of ``table`` to plan (a mini-batch), the same on every rank; None for all.
            rank, world: of the data-parallel group, where the batch was attached by every process of a
                larger world; as attached when left out, 0 and 1 for a claimer.
            policy: what to do with segments that are too long, and ranks with too few.

        Raises:
            InvalidInput: a segment is longer than ``max_tokens``, or a rank has too few segments, and the
                policy refuses that.
        """
        rank = (self.rank or 0) if rank is None else rank
        world = (self.world or 1) if world is None else world
        if not 0 <= rank < world:
            raise InvalidInput(f"plan: rank {rank} of world {world}: expected 0 <= rank < world")
        policy = policy or PlanPolicy()
        chosen = list(range(len(self))) if rows is None else self._rows(rows)
        if len(set(chosen)) != len(chosen):
            raise InvalidInput("plan: rows name a segment twice, which would be trained twice")
        bins = pack(self.num_tokens[chosen], world, max_tokens, seed, policy)
        by_rank = [[[chosen[index] for index in one] for one in part] for part in bins]
        return Plan(self, by_rank, rank, max_tokens, policy)

    def prefetch(
        self,
        micros: Iterable[MicroBatch],
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> Prefetch:
        """Iterate a schedule of one's own as ``(micro, data)``, fetched ahead; as ``Plan.prefetch``."""
        return Prefetch(list(micros), fields, layers, ahead_bytes)

    def fetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        rows: Sequence[int] | npt.NDArray[np.integer] | None = None,
        out: Mapping[str, object] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        """Read the payload: ``data[field][i]`` is the array of the i-th segment.

        Args:
            fields: names of the run's fields.
            layers: global layer ids, in the order wanted; None for all.
            rows: which rows of ``table``; None for all.
            out: buffers to fill, by field: ``[sum of T, *item]``, numpy or CPU torch tensors (pinned ones
                too); values are widened to their dtype.
            expect_tokens: token ids that the caller has, packed or one array a segment, to be sure that
                the rows are those of its tokens.

        Raises:
            Hole: a position in a field's domain that nobody wrote.
            Misaligned: stored token ids differ from ``expect_tokens``.
            ChunkReleased, ChunkLost, ChunkPending: naming the chunks.
        """
        chosen = self._chosen(rows)
        names, wanted = self._fields(fields)
        extra = expect_tokens is not None and TOKEN_FIELD not in names
        if extra:
            wanted.append(token_field(self.run.fields))
        data = self._fetch(chosen, wanted, layers, out)
        if expect_tokens is not None:
            check_tokens(data[TOKEN_FIELD], [self.segment_ids[row] for row in chosen], expect_tokens)
        return data if not extra else Data({name: data[name] for name in names}, data.offsets, data.origin)

    def fetch_bytes(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        rows: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> int:
        """Bytes of the buffers that such a ``fetch`` would make, from metadata alone."""
        _, wanted = self._fields(fields)
        tokens = int(self.num_tokens[self._chosen(rows)].sum())
        shapes = [(item_shape(field, chosen_layers(field, layers)), field) for field in wanted]
        return tokens * sum(math.prod(shape) * field.type.numpy.itemsize for shape, field in shapes)

    def handles(
        self, field: str, rows: Sequence[int] | npt.NDArray[np.integer] | None = None
    ) -> list[npt.NDArray[np.int32]]:
        """By segment, ``[T, 6]`` int32 that stand for a field's rows: 24 bytes a token. No payload is read.

        They may be packed, padded, split, gathered, promoted to int64 and summed with zeros; then
        ``run.resolve`` gives the payload in the order that they are in. A position outside the field's
        domain (the last one of a forwarded field) is a fill handle; one that nobody wrote is an error to
        resolve.
        """
        declared = self.run.field(field)
        return segment_handles(declared, self._load(self._chosen(rows), [declared]))

    def put(
        self, field: str, arrays: object, rows: Sequence[int] | npt.NDArray[np.integer] | None = None
    ) -> int:
        """Store values that the trainer made (old or teacher log-probs, values) for each segment.

        A segment shows them to every reader once all of its rows are stored: its ``complete_fields`` then
        names the field, so that a task can claim on it (``list_contains(complete_fields, 'values')``), and
        ``fetch`` reads them. They live until every task that reads the field is done with the segment.

        Args:
            field: a field of the run; ``run.add_field`` declares one late.
            arrays: a list with one array a segment (numpy, lists, torch), or one packed array ``[sum of T,
                *item]``. A segment's array has T rows; for a forwarded field also T - 1; for a sampled
                field also those from the first sampled position on (response-only), or the sampled rows
                alone.
            rows: which rows of ``table`` they are for; None for all.

        Returns:
            How many segments got values; those that had the same ones from this claim already are left out.

        Raises:
            RowCountMismatch: an array has another number of rows; names the segment and what was expected.
            Conflict: the segment has other values: from its rollout, or from this or another live claim.
            ChunkReleased: every task that reads the field is done with the segment, or it was discarded.
            ClaimGone: the lease expired before.
        """
        declared = self.run.field(field)
        chosen = self._chosen(rows)
        # What others put since is not to be overwritten unseen: the store decides on its newest state.
        manifests = self._load(chosen, [])
        for row in chosen:
            self._manifests.pop(row, None)
        return put_values(self.run, self._claim_id, declared, manifests, arrays)

    def release(self) -> None:
        """This rank (or, for a claimer that nobody attached to, everyone) is done. Idempotent.

        Raises:
            ClaimGone: the lease expired before.
        """
        if self._keeper is not None:
            self._keeper.stop()
        self._manifests.clear()
        self.run.batches.discard(self)
        command = ReleaseClaim(run=self.run.name, claim_id=self._claim_id, rank=self.rank, world=self.world)
        ask(self.run.backend, command, Done)

    async def afetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        rows: Sequence[int] | npt.NDArray[np.integer] | None = None,
        out: Mapping[str, object] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        return await self.run.threads.call(self.fetch, fields, layers, rows, out, expect_tokens)

    async def ahandles(
        self, field: str, rows: Sequence[int] | npt.NDArray[np.integer] | None = None
    ) -> list[npt.NDArray[np.int32]]:
        return await self.run.threads.call(self.handles, field, rows)

    async def aput(
        self, field: str, arrays: object, rows: Sequence[int] | npt.NDArray[np.integer] | None = None
    ) -> int:
        return await self.run.threads.call(self.put, field, arrays, rows)

    async def arelease(self) -> None:
        await self.run.threads.call(self.release)

    def _rows(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> list[int]:
        chosen = [int(row) for row in rows]
        wrong = [row for row in chosen if not 0 <= row < len(self)]
        if wrong:
            raise InvalidInput(f"rows {wrong}: the batch has rows 0 to {len(self) - 1}")
        return chosen

    def _chosen(self, rows: Sequence[int] | npt.NDArray[np.integer] | None) -> list[int]:
        return list(range(len(self))) if rows is None else self._rows(rows)

    def _fields(self, names: str | Sequence[str]) -> tuple[list[str], list[Field]]:
        plain = [names] if isinstance(names, str) else list(dict.fromkeys(names))
        return plain, [self.run.field(name) for name in plain]

    def manifests(self) -> list[Manifest]:
        """Manifests of its segments: which rows of which chunks they are; not of those that ended."""
        missing = [row for row in range(len(self)) if row not in self._manifests]
        if missing:
            ids = [self.segment_ids[row] for row in missing]
            present = segments.present(self.run.backend, self.run.name, ids)
            self._load([row for row in missing if self.segment_ids[row] in present], [])
        return list(self._manifests.values())

    def _fetch(
        self,
        rows: Sequence[int],
        wanted: Sequence[Field],
        layers: Sequence[int] | None,
        out: Mapping[str, object] | None,
    ) -> Data:
        where = self.run.backend, self.run.name
        known = self._load(rows, wanted)
        try:
            return fetch(*where, known, wanted, layers, out, self.run.reading)
        except ChunkReleased:
            # Late values may have been replaced since their manifest was read: then it says so now.
            for row in rows:
                self._manifests.pop(row, None)
            newer = self._load(rows, wanted)
            if all(_shows_alike(one, other, wanted) for one, other in zip(known, newer, strict=True)):
                raise
            return fetch(*where, newer, wanted, layers, out, self.run.reading)

    def _load(self, rows: Sequence[int], fields: Sequence[Field]) -> list[Manifest]:
        """Manifests of these rows, each asked for once; again where a field may have come since."""
        # Other threads (a prefetch) load and forget too: the answer is made of what was seen here.
        known = {row: self._manifests.get(row) for row in rows}
        missing = sorted(
            row
            for row, manifest in known.items()
            if manifest is None or any(_is_bare(manifest, field) for field in fields)
        )
        if missing:
            ids = [self.segment_ids[row] for row in missing]
            _, manifests = segments.load(self.run.backend, self.run.name, ids)
            fresh = dict(zip(missing, manifests, strict=True))
            self._manifests.update(fresh)
            known.update(fresh)
        return [manifest for row in rows if (manifest := known[row]) is not None]

    def __repr__(self) -> str:
        return f"Batch({len(self)} segments for task {self.task!r} of run {self.run.name!r})"


def _is_bare(manifest: Manifest, field: Field) -> bool:
    """Whether it shows nothing of a field that should have rows: they may have been put since."""
    if len(manifest.spans.get(field.name, ())):
        return False
    return len(domain_ranges(field, manifest.num_tokens, manifest.sampled)) > 0


def _shows_alike(one: Manifest, other: Manifest, fields: Sequence[Field]) -> bool:
    nothing = empty_spans()
    return all(
        np.array_equal(one.spans.get(field.name, nothing), other.spans.get(field.name, nothing))
        for field in fields
    )
