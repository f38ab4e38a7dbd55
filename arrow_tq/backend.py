"""What a store's front needs from behind: the seam between the engine here and a server elsewhere.

``arrow_tq.store.Engine`` implements it in this process, ``arrow_tq.client.FlightBackend`` over Arrow
Flight. Everything that users touch (runs, sessions, batches) is written once, on this protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.commands import Command, Reply, StepCommit, StepResult
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.spans import Spans


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


class PutHandle(Protocol):
    """A put under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every chunk is stored; raise the first error, or ``DeadlineExceeded``."""


class Backend(Protocol):
    """A store without its front. All methods may be called from any thread."""

    @property
    def url(self) -> str:
        """Where the store is: a path or ``grpc://host:port``."""

    @property
    def puts_in_background(self) -> bool:
        """Whether ``put`` may return before it has read the chunks' memory."""

    def shard(self) -> int:
        """Shard number for the next new chunk."""

    def execute(self, command: Command) -> Reply:
        """Answer one command; raises the errors of ``arrow_tq_schemas.errors``."""

    def commit(self, step: StepCommit) -> StepResult:
        """Commit one step; returns after it is as durable as its run says. Raises its error."""

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PutHandle:
        """Start storing chunks of one field (their ids name the layer group). May block for room.

        The caller leaves the chunks' memory as it is until the handle's ``wait`` returns.
        """

    def read(self, request: Read) -> Iterator[Rows]:
        """The rows of all spans in request order, in blocks that need not follow span borders.

        Raises ``ChunkReleased``, ``ChunkLost`` or ``ChunkPending`` naming the ids concerned. Never an
        answer shorter than asked. Blocks are read-only and valid while referenced.
        """

    def close(self) -> None:
        """Let go of threads, connections and files. Idempotent."""
