"""What the metadata side of a store asks of its chunks, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from arrow_tq.backend import Read, Rows
from arrow_tq.store.catalog.config import ChunkPins
from arrow_tq.store.shard import Shard
from arrow_tq.store.shard_config import ShardUsage
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.commands import PutValues, StepCommit
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import Receipt

Attached = tuple[str, Receipt]
"""A run, and the receipt of rows that a commit attaches in it."""
OwnReader = Callable[[Read], Iterator[Rows]]


class ChunkHolder(ChunkPins, Protocol):
    """Chunks by id: of the one shard in this process (``OneShard``), or of many (``cluster.ShardSet``).

    What is asked about a shard that is out of reach raises ``Unavailable`` naming it.
    """

    def confirming(self, attached: Sequence[Attached]) -> AbstractContextManager[None]:
        """Around a commit that attaches these rows: they are known to be stored, and stay."""

    def is_pinned(self, chunk_id: ChunkId) -> bool:
        """Whether a step attached it; of a far chunk, whether the commit under way did."""

    def get(self, chunk_id: ChunkId) -> Chunk | None:
        """The chunk, attached or not; None: not there."""

    def drop(self, ids: Iterable[ChunkId]) -> None:
        """Forget released chunks."""

    def free(self, run: str, ids: Iterable[ChunkId]) -> int:
        """Forget those of the run that no step attached; gives how many that were."""

    def keep(self, run: str, ids: Iterable[ChunkId]) -> int:
        """As if those of the run that no step attached were put just now; gives how many that were."""

    def read(self, request: Read, own: OwnReader) -> Iterator[Rows]:
        """Rows in request order; ``own`` reads what is in this process."""

    def usage(self) -> ShardUsage:
        """Bytes and counts, all shards together."""

    def level(self) -> tuple[int, int]:
        """Bytes used, and the capacity, as in ``usage``."""

    def make_room(self) -> bool:
        """Give back what is allocated here and holds nothing; whether that was anything."""


class OneShard:
    """Implements ``ChunkHolder`` over a shard in this process: a commit's chunks are looked up in it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        # Bound methods: nothing is added to what is called for each chunk.
        self.pin = shard.pin
        self.unpin = shard.unpin
        self.header = shard.header
        self.holds = shard.holds
        self.sha256 = shard.sha256
        self.is_pinned = shard.is_pinned
        self.get = shard.get
        self.drop = shard.drop
        self.usage = shard.usage
        self.level = shard.level
        self.make_room = shard.make_room

    def confirming(self, attached: Sequence[Attached]) -> AbstractContextManager[None]:
        """Nothing: the commit itself pins."""
        return nullcontext()

    def free(self, run: str, ids: Iterable[ChunkId]) -> int:
        return self._shard.drop_unpinned(of_run(self._shard, run, ids))

    def keep(self, run: str, ids: Iterable[ChunkId]) -> int:
        return self._shard.keep_unpinned(of_run(self._shard, run, ids))

    def read(self, request: Read, own: OwnReader) -> Iterator[Rows]:
        return own(request)


def attached_by(commits: Iterable[StepCommit | PutValues]) -> list[Attached]:
    """Everything that these commits attach."""
    found: list[Attached] = []
    for commit in commits:
        if isinstance(commit, PutValues):
            found += [(commit.run, receipt) for value in commit.values for receipt in value.receipts]
            continue
        found += [(commit.run, receipt) for receipt in commit.receipts]
        found += [(commit.run, blob.receipt) for blob in commit.blobs if blob.receipt is not None]
    return found


def of_run(shard: Shard, run: str, ids: Iterable[ChunkId]) -> list[ChunkId]:
    """Those of the ids that are there and of the run."""
    headers = [(chunk_id, shard.header(chunk_id)) for chunk_id in ids]
    return [chunk_id for chunk_id, header in headers if header is not None and header.run == run]
