"""A micro-batch: some rows of a claimed batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.trainer.data import Data

if TYPE_CHECKING:
    from arrow_tq.trainer.batch import Batch

Array = npt.NDArray[np.generic]


class MicroBatch:
    """Some rows of a batch. ``fetch`` as often as passes need; ``close`` drops local buffers only.

    Attributes:
        batch: the batch.
        rows: rows of the batch's table, in order.
        table: their metadata.
        segment_ids: their ids.
        index: its number in the plan that made it; 0 where ``select`` did.
        padding: it repeats a segment that another micro-batch has, so that ranks have equal numbers: weigh
            its loss with 0.
    """

    def __init__(self, batch: Batch, rows: Sequence[int], index: int = 0, padding: bool = False) -> None:
        self.batch = batch
        self.rows = list(rows)
        self.index = index
        self.padding = padding
        self._table: pa.Table | None = None
        self._fetched: list[Data] = []

    @property
    def table(self) -> pa.Table:
        """Metadata of its segments: their rows of the batch's table."""
        if self._table is None:
            self._table = self.batch.table.take(pa.array(self.rows, pa.int64()))
        return self._table

    @property
    def segment_ids(self) -> list[str]:
        """Ids of its segments, in its order."""
        return [self.batch.segment_ids[row] for row in self.rows]

    @property
    def num_tokens(self) -> int:
        """Tokens of all its segments."""
        return int(self.batch.num_tokens[self.rows].sum())

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        out: Mapping[str, object] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        """As ``Batch.fetch``, of these rows, in their order."""
        data = self.batch.fetch(fields, layers, self.rows, out, expect_tokens)
        self.keep(data)
        return data

    def handles(self, field: str) -> list[npt.NDArray[np.int32]]:
        """As ``Batch.handles``, of these rows."""
        return self.batch.handles(field, self.rows)

    def put(self, field: str, arrays: object) -> int:
        """As ``Batch.put``, for these rows. Padding is put by the micro-batch that it repeats: not here."""
        return 0 if self.padding else self.batch.put(field, arrays, self.rows)

    def fetch_bytes(self, fields: str | Sequence[str], layers: Sequence[int] | None = None) -> int:
        """Bytes of the buffers that a ``fetch`` would make, from metadata alone."""
        return self.batch.fetch_bytes(fields, layers, self.rows)

    def keep(self, data: Data) -> None:
        """Let ``close`` drop this data too."""
        self._fetched.append(data)

    def close(self) -> None:
        """Let go of what was fetched here. The store keeps it until the batch is released."""
        for data in self._fetched:
            data.close()
        self._fetched.clear()

    async def afetch(
        self,
        fields: str | Sequence[str],
        layers: Sequence[int] | None = None,
        out: Mapping[str, object] | None = None,
        expect_tokens: Array | Sequence[Array] | None = None,
    ) -> Data:
        return await self.batch.run.threads.call(self.fetch, fields, layers, out, expect_tokens)

    async def ahandles(self, field: str) -> list[npt.NDArray[np.int32]]:
        return await self.batch.run.threads.call(self.handles, field)

    async def aput(self, field: str, arrays: object) -> int:
        return await self.batch.run.threads.call(self.put, field, arrays)

    def __repr__(self) -> str:
        return f"MicroBatch({self.index}: {len(self)} segments, {self.num_tokens} tokens)"
