"""The cluster: which servers hold which shards, and what catalog and shards say to each other.

A **shard** is a numbered part of the chunk space. The catalog keeps the versioned map of them; a shard
joins under its number and proves by beats that it is there. Each join makes a new **epoch** of the shard:
whatever calls a shard names its epoch, and a process of an older one answers nothing. So a number is given
to another process only when the one before cannot answer any more: it said so (``LeaveCluster``), it was not
answered for as long as it was told (``Joined.fence_s``), or its data directory is locked by the next one.

Commands to a shard (``ToShard``) come from the catalog alone. None of them needs a request id: said again,
each does the same again. So does a beat, and a join makes one epoch more.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field as Bound

from arrow_tq_schemas.chunks import Count, Hex128
from arrow_tq_schemas.command_base import Command, Seconds, Wire
from arrow_tq_schemas.ids import SHARD_MAX

ShardNumber = Annotated[int, Bound(ge=0, le=SHARD_MAX)]
Ids = Annotated[list[Hex128], Bound(max_length=100_000)]


class ShardServer(Wire):
    """One server of a shard."""

    url: str
    host: str
    """Boot id of its machine: equal for processes that can share memory."""


class ShardEntry(Wire):
    """A shard in the map."""

    number: ShardNumber
    epoch: Count
    servers: list[ShardServer]
    """In the order in which to ask them. This version has one a shard."""
    capacity_bytes: Count
    used_bytes: Count
    up: bool
    """Whether its lease has not run out."""
    caches: bool = False
    """Whether it keeps chunks of other nodes for the readers of its own."""
    takes_new: bool = True
    """Whether new chunks may be placed there."""


class ClusterMap(Wire):
    """Reply to ``GetCluster``. ``version`` grows whenever a shard joins, moves, goes or comes back."""

    version: Count
    catalog: Hex128
    """Changes when the catalog starts anew."""
    lease_s: float
    shards: list[ShardEntry]

    def shard(self, number: int) -> ShardEntry | None:
        """The entry of a shard; None: there is no such shard."""
        return next((one for one in self.shards if one.number == number), None)


class GetCluster(Command):
    """The map of shards."""

    verb: ClassVar[str] = "cluster"


class GetRun(Command):
    """A run's declaration, epoch and policy version; nothing is created."""

    verb: ClassVar[str] = "get_run"
    run: str


# -- a shard to the catalog ------------------------------------------------------------------------


class JoinCluster(Command):
    """A shard is there. ``node`` is what its data directory is called for life; its number goes with it."""

    verb: ClassVar[str] = "join_cluster"
    node: Hex128
    server: ShardServer
    capacity_bytes: Count
    used_bytes: Count
    caches: bool = False
    number: ShardNumber | None = None
    """The number that it had before; None: a new shard."""
    lock: Hex128
    """Of its data directory, as it lies on its machine: of two processes with the same one, the earlier has
    ended."""


class Joined(Wire):
    """Reply to ``JoinCluster``."""

    number: ShardNumber
    epoch: Count
    lease_s: float
    """After so long without a beat it is down, and asks before it answers."""
    fence_s: float
    """After so long without a beat another process may have its number, and it answers nothing."""
    catalog: Hex128


class Beat(Command):
    """A shard is still there, and takes what the catalog has for it."""

    verb: ClassVar[str] = "shard_beat"
    number: ShardNumber
    epoch: Count
    lock: Hex128
    """As it joined: a catalog that lost its map counts epochs from 1 again."""
    used_bytes: Count
    capacity_bytes: Count
    catalog: Hex128 | None = None
    done: Count = 0
    """Number of the last news of that ``catalog`` that it dealt with."""
    wait_s: Seconds = 0.0
    """How long to wait for released chunks before an answer without any."""


class News(Wire):
    """Reply to ``Beat``: chunks whose state changed, to be dealt with in order."""

    last: Count
    """Number of the last of these news."""
    attached: Ids = Bound(default_factory=list)
    released: Ids = Bound(default_factory=list)
    reconcile: bool = False
    """Some news were lost (the catalog started anew, or had too many): ask for the state of everything."""
    more: bool = False
    catalog: Hex128


class LeaveCluster(Command):
    """A shard ends: from now on it answers nothing, and another process may have its number."""

    verb: ClassVar[str] = "leave_cluster"
    number: ShardNumber
    epoch: Count
    lock: Hex128


class ChunkStates(Command):
    """The catalog's state of chunks, all layer groups alike."""

    verb: ClassVar[str] = "chunk_states"
    ids: Ids
    run: str | None = None
    """Only chunks of this run; others read as unknown."""


class States(Wire):
    """committed, released, ``held`` (a step is about to attach it), or None: no step ever did."""

    states: list[Literal["committed", "released", "held"] | None]


# -- the catalog to a shard ------------------------------------------------------------------------


class ToShard(Command):
    """Base of what the catalog asks a shard; of another epoch it is refused."""

    number: ShardNumber
    epoch: Count
    ids: Ids


class ConfirmChunks(ToShard):
    """A step is about to attach these: say what is stored, as durable as the run says, and keep it."""

    verb: ClassVar[str] = "confirm_chunks"
    run: str


class ConfirmedChunk(Wire):
    """What a chunk's header says."""

    run: str
    epoch: Count
    field: str
    start: Count
    rows: Count
    checksum: str


class Confirmed(Wire):
    """Reply to ``ConfirmChunks`` and ``FetchChunks``, in the order of the ids; None: not there."""

    chunks: list[ConfirmedChunk | None]
    used_bytes: Count | None = None
    """Of the shard, with these chunks in it; None: not said."""


class FetchChunks(ToShard):
    """Whole chunks, attached or not. Two blobs of the reply a chunk: its values, and a byte a row that says
    which are valid (none: all of them). Of one that is not there both are empty.
    """

    verb: ClassVar[str] = "fetch_chunks"


class DigestChunks(ToShard):
    """The SHA-256 of these chunks' values one after another; of what is not there, nothing."""

    verb: ClassVar[str] = "digest_chunks"


class Digest(Wire):
    """Reply to ``DigestChunks``."""

    sha256: str


class TendChunks(ToShard):
    """Of those that no step attached: let them go, or begin their time to live anew. Counts them."""

    verb: ClassVar[str] = "tend_chunks"
    run: str
    keep: bool
