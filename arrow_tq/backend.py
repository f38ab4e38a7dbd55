"""What a store's front needs from behind: the seam between the engine here and a server elsewhere.

``arrow_tq.store.Engine`` implements it in this process, ``arrow_tq.client.FlightBackend`` over Arrow
Flight. Everything that users touch (runs, sessions, batches) is written once, on this protocol.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.commands import Command, Reply, RunInfo, StepCommit, StepResult
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import Spans

COPYING_THREADS_MAX = 4


def copying_threads() -> int:
    """Threads that one copy of views is spread over: a core alone does not use all that memory can give."""
    return min(COPYING_THREADS_MAX, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Rows of one field and layer group, span by span."""

    run: str
    field: Field
    group: int
    layers: tuple[int, ...] | None
    """Indices on the group's layer axis, in the order wanted; None: all of them."""
    spans: Spans
    """``SPAN_DTYPE`` rows with ids of group 0; ``start`` is only for messages."""
    wait_s: float = 0.0
    """How long to wait for chunks whose step is still open."""
    whole: bool = False
    """Each span comes as one block, neither joined with others nor cut."""

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Shape of one row of the answer."""
        shape = list(self.field.group_shape(self.group))
        if self.layers is not None and self.field.layer_axis is not None:
            shape[self.field.layer_axis] = len(self.layers)
        return tuple(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Consecutive rows of an answer: ``values`` is ``[n, *item]``, ``valid`` ``[n]`` or None for all."""

    values: npt.NDArray[np.generic]
    valid: npt.NDArray[np.bool_] | None
    stay: bool = False
    """They lie where they are stored: holding many of them takes no memory."""


Fill = Callable[[npt.NDArray[np.uint8]], Iterable[int]]
"""Writes bytes into the memory that it is given, all of it, while what it returns is gone through.

That is the end of each part when it is written, in order, so that it can be hashed while it is in the
processor's cache; the rest after the last is one part.
"""


def written(out: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8]) -> Iterable[int]:
    """A ``Fill`` with bytes that are there already."""
    np.copyto(out, values)
    return ()


class BundleWriter(Protocol):
    """Stores the chunks of one bundle, which nobody sees before it is committed."""

    @property
    def bundle_id(self) -> str:
        """Id of the first chunk, hex; the others count up from it."""

    @property
    def chunk_bytes(self) -> int:
        """Aimed size of a chunk."""

    def write(self, index: int, nbytes: int, fill: Fill) -> None:
        """Store the chunk of that number; ``fill`` is called once, before this returns. May block for room.

        Chunks come in any order, each once; those of a bundle count from 0 without a gap.
        """

    def finish(self) -> None:
        """Return when every chunk is stored, as durable as the run says; raise the first error."""

    def abandon(self) -> None:
        """Free what was stored, if it was not committed."""


class PutHandle(Protocol):
    """A put under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every chunk is stored; raise the first error, or ``DeadlineExceeded``."""


class Header(NamedTuple):
    """What is written beside a chunk's values, ready to be written."""

    chunk_id: ChunkId
    epoch: int
    start: int
    checksum: str
    raw: bytes
    """The ``ChunkHeader`` as JSON."""


class Place(Protocol):
    """Room for the same rows of every layer group of a field, in the store's own memory.

    Nobody sees anything of it before ``publish``; either that or ``abandon`` has to follow at once.
    """

    @property
    def values(self) -> list[npt.NDArray[np.generic]]:
        """``[rows, *group item]`` in the storage dtype, one a layer group, to be written to."""

    def publish(self, headers: Sequence[Header]) -> None:
        """What was written is complete: one chunk a layer group, no row null."""

    def abandon(self) -> None:
        """Nothing comes after all. Also after ``publish``, where it does nothing."""

    def withdraw(self) -> None:
        """Take back what was published, where another part of the same put failed."""


class Placer(Protocol):
    """Stores rows without a copy of their own: whoever converts them writes them where they will stay."""

    def reserve(self, field: Field, run: str, rows: int, header_bytes: int, shard: int) -> Place | None:
        """Room for a chunk a layer group; None: put them the other way (``Backend.put``).

        Args:
            header_bytes: length of each ``Header.raw``.
            shard: the one that the chunks' ids will name.

        Raises:
            StoreFull: no room; nothing is held.
        """

    def stored(self, run: str, places: Sequence[Place]) -> PutHandle:
        """A handle for what was published in these places."""


class Backend(Protocol):
    """A store without its front. All methods may be called from any thread."""

    @property
    def url(self) -> str:
        """Where the store is: a path or ``grpc://host:port``."""

    @property
    def puts_in_background(self) -> bool:
        """Whether ``put`` may return before it has read the chunks' memory."""

    @property
    def placer(self) -> Placer | None:
        """How rows are written in place; None where they have to travel."""

    def shard(self) -> int:
        """Shard number for the next new chunk."""

    def execute(self, command: Command) -> Reply:
        """Answer one command; raises the errors of ``arrow_tq_schemas.errors``."""

    def commit(
        self, step: StepCommit, puts: Sequence[PutHandle] = (), wait_s: float | None = None
    ) -> StepResult:
        """Commit one step; returns after it is as durable as its run says. Raises its error.

        Args:
            puts: under way, and whose chunks the step attaches: the first error of these comes first.
            wait_s: how long to wait for each of them.
        """

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        """Start storing chunks of one field (their ids name the layer group). May block for room.

        The caller leaves the chunks' memory as it is until the handle's ``wait`` returns.
        """

    def read(self, request: Read) -> Iterator[Rows]:
        """The rows of all spans in request order, in blocks that need not follow span borders.

        Raises ``ChunkReleased``, ``ChunkLost`` or ``ChunkPending`` naming the ids concerned. Never an
        answer shorter than asked. Blocks are read-only and valid while referenced.
        """

    @property
    def reads_in_place(self) -> bool:
        """Whether ``read`` gives views of the store's own memory."""

    @property
    def reads_at_once(self) -> int:
        """Parts of one large read that are worth reading at a time; 1 where ``read`` sees to it."""

    def bundle_writer(self, run: RunInfo) -> BundleWriter:
        """For one new bundle of a run."""

    def end_lease(self, run: str, lease_id: str) -> None:
        """A bundle's reader is done. Never raises; safe in a finalizer where reads are in place."""

    def close(self) -> None:
        """Let go of threads, connections and files. Idempotent."""
