"""A claimed batch: metadata at once, payload when asked, released when done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.calls import ask
from arrow_tq.trainer import segments
from arrow_tq.trainer.data import Data
from arrow_tq.trainer.fetch import check_tokens, fetch, token_field
from arrow_tq.trainer.lease import LeaseKeeper
from arrow_tq.trainer.reference import BatchRef
from arrow_tq_schemas.commands import ClaimInfo, Done, ReleaseClaim
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import TOKEN_FIELD
from arrow_tq_schemas.manifests import Manifest

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

    def fetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        rows: Sequence[int] | npt.NDArray[np.integer] | None = None,
        out: Mapping[str, Array] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        """Read the payload: ``data[field][i]`` is the array of the i-th segment.

        Args:
            fields: names of the run's fields.
            layers: global layer ids, in the order wanted; None for all.
            rows: which rows of ``table``; None for all.
            out: buffers to fill, by field: ``[sum of T, *item]``; values are widened to their dtype.
            expect_tokens: token ids that the caller has, packed or one array a segment, to be sure that
                the rows are those of its tokens.

        Raises:
            Hole: a position in a field's domain that nobody wrote.
            Misaligned: stored token ids differ from ``expect_tokens``.
            ChunkReleased, ChunkLost, ChunkPending: naming the chunks.
        """
        chosen = list(range(len(self))) if rows is None else self._rows(rows)
        names = [fields] if isinstance(fields, str) else list(dict.fromkeys(fields))
        wanted = [self.run.field(name) for name in names]
        extra = expect_tokens is not None and TOKEN_FIELD not in names
        if extra:
            wanted.append(token_field(self.run.fields))
        data = fetch(self.run.backend, self.run.name, self._load(chosen), wanted, layers, out)
        if expect_tokens is not None:
            check_tokens(data[TOKEN_FIELD], [self.segment_ids[row] for row in chosen], expect_tokens)
        if not extra:
            return data
        return Data({name: data[name] for name in names}, data.offsets, data.versions)

    def release(self) -> None:
        """This rank (or, for a claimer that nobody attached to, everyone) is done. Idempotent.

        Raises:
            ClaimGone: the lease expired before.
        """
        if self._keeper is not None:
            self._keeper.stop()
        self._manifests.clear()
        command = ReleaseClaim(run=self.run.name, claim_id=self._claim_id, rank=self.rank, world=self.world)
        ask(self.run.backend, command, Done)

    async def afetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        rows: Sequence[int] | npt.NDArray[np.integer] | None = None,
        out: Mapping[str, Array] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        return await self.run.threads.call(self.fetch, fields, layers, rows, out, expect_tokens)

    async def arelease(self) -> None:
        await self.run.threads.call(self.release)

    def _rows(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> list[int]:
        chosen = [int(row) for row in rows]
        wrong = [row for row in chosen if not 0 <= row < len(self)]
        if wrong:
            raise InvalidInput(f"rows {wrong}: the batch has rows 0 to {len(self) - 1}")
        return chosen

    def _load(self, rows: Sequence[int]) -> list[Manifest]:
        """Manifests of these rows; each is asked for once in the batch's life."""
        missing = sorted({row for row in rows if row not in self._manifests})
        if missing:
            ids = [self.segment_ids[row] for row in missing]
            _, manifests = segments.load(self.run.backend, self.run.name, ids)
            self._manifests.update(zip(missing, manifests, strict=True))
        return [self._manifests[row] for row in rows]

    def __repr__(self) -> str:
        return f"Batch({len(self)} segments for task {self.task!r} of run {self.run.name!r})"


class MicroBatch:
    """Some rows of a batch. ``fetch`` as often as passes need; ``close`` drops local buffers only."""

    def __init__(self, batch: Batch, rows: Sequence[int]) -> None:
        self.batch = batch
        self.rows = list(rows)
        self.table: pa.Table = batch.table.take(pa.array(self.rows, pa.int64()))
        self.segment_ids = [batch.segment_ids[row] for row in self.rows]
        self._fetched: list[Data] = []

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        out: Mapping[str, Array] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        """As ``Batch.fetch``, of these rows, in their order."""
        data = self.batch.fetch(fields, layers, self.rows, out, expect_tokens)
        self._fetched.append(data)
        return data

    def close(self) -> None:
        """Let go of what was fetched here. The store keeps it until the batch is released."""
        for data in self._fetched:
            data.close()
        self._fetched.clear()

    async def afetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        out: Mapping[str, Array] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        return await self.batch.run.threads.call(self.fetch, fields, layers, out, expect_tokens)
