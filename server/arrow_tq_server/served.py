"""What the server asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import pyarrow as pa

from arrow_tq.backend import Backend
from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.commands import Claim, Pressure, Reply, StreamAnswers, StreamMessage
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import PutStream


class ServedEngine(Backend, Protocol):
    """A backend that also takes what comes from the network. ``arrow_tq.store.Engine`` is one."""

    def claim(self, command: Claim, is_gone: Callable[[], bool]) -> Reply:
        """Answer a claim; nothing is taken for a claimer that ``is_gone`` after it waited."""

    def has_run(self, run: str) -> bool:
        """Whether there is such a run."""

    def check_serving(self) -> None:
        """Whether what was made may be sent; raises ``Unavailable`` where another process serves by now."""

    def field(self, run: str, name: str) -> Field:
        """The declared field; raises ``NotFound``."""

    def receive(
        self, stream: PutStream, headers: Sequence[ChunkHeader], batch: pa.RecordBatch
    ) -> list[ArrowTQError | None]:
        """Validate the chunks of a batch and store them, each by itself: why one was refused, or None.

        Nothing is stored when this raises.
        """

    def sync(self, run: str) -> None:
        """Return when what was put before is as durable as the run declares."""

    def answer(self, message: StreamMessage) -> StreamAnswers:
        """Answer a message of a commit stream; errors are in the answers."""

    def query(self, query: str, run: str | None) -> pa.Table:
        """SQL over the metadata."""

    def pressure_of(self, runs: Collection[str]) -> Pressure:
        """The store's fill, with sessions and segments of these runs alone."""

    def stats(self) -> dict[str, float]:
        """Statistics by name, labels in braces as Prometheus writes them."""
