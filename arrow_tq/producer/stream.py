"""A field of an open step, written while its response still comes in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from arrow_tq.aio import Threads
from arrow_tq.calls import ask
from arrow_tq.producer.encode import rows_per_chunk
from arrow_tq.recorder.keeper import KEEP_S, keep
from arrow_tq.recorder.request import trimmed
from arrow_tq.recorder.rows import narrow
from arrow_tq.recorder.window import CHUNK_ROWS_MAX, Piece, Windows
from arrow_tq.recorder.writers import each_group, encode_piece
from arrow_tq_schemas.commands import Done, DropChunks
from arrow_tq_schemas.errors import Conflict, InvalidInput, RowCountMismatch
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import IdSeries
from arrow_tq_schemas.receipts import Receipt, StoredChunk

if TYPE_CHECKING:
    from arrow_tq.producer.step import Step


class StepStream:
    """Rows of one field of an open step. Made by ``step.stream``; not thread-safe.

    Rows that left the tail window are stored, in the background where the store is remote; nothing that
    was stored is ever written again.
    """

    def __init__(self, step: Step, field: Field, window_tokens: int) -> None:
        if window_tokens < 0:
            raise InvalidInput(f"stream of {field.name!r}: window_tokens={window_tokens}: expected 0 or more")
        self.field = field
        self._step = step
        self._run = step.session.run
        # One shard for all of it: the ids of its chunks then differ by their count alone.
        self._shard = step.session.shard()
        chunk_rows = min(rows_per_chunk(field, self._run.chunk_bytes), CHUNK_ROWS_MAX)
        self._windows = Windows(field, 1, chunk_rows, window_tokens)
        self._ids = IdSeries()
        self._chunks: list[StoredChunk] = []
        self._finished = False
        self._kept_at = time.monotonic()

    def append(self, start: int, rows: object) -> None:
        """Take rows at positions ``[start, start + len(rows))``; the array is the caller's again after.

        The first append says where the field starts in this step. Later ones begin at its end, or up to
        ``window_tokens`` before it: what was there is replaced.

        Args:
            start: absolute position of the first row.
            rows: ``[rows, *field.shape]``, as ``step.put`` takes them.

        Raises:
            InvalidInput: ``start`` is below the window's floor or beyond the end; names both.
            InvalidField, ValueOutOfRange, StoreFull: as for ``step.put``.
            Conflict: the stream is finished, or its step is over.
        """
        self._check_open("append")
        starts = np.array([start], np.int64)
        narrowed, lengths = narrow(self.field, rows, starts, None)
        name = f"{self._step.session.id}/{self._step.id}"
        for piece in self._windows.append(np.zeros(1, np.int64), starts, lengths, narrowed, [name]):
            self._store(piece)
        if time.monotonic() - self._kept_at > KEEP_S:
            self._kept_at = time.monotonic()
            keep(self._run, self._step.written_chunks())

    def finish(self, kept: int | None = None) -> Receipt | None:
        """Attach the rows at positions before ``kept`` (all when None) to the step; None where none came.

        Raises:
            RowCountMismatch: ``kept`` is beyond the rows; names both.
            Conflict: the stream is finished, or the step has rows at these positions already.
        """
        self._check_open("finish")
        span = self._windows.span(0)
        if span is None:
            if kept:
                raise RowCountMismatch(f"stream of {self.field.name!r}: no rows came, kept is {kept}")
            self._finished = True
            return None
        first, end = span
        wanted = end if kept is None else kept
        if not 0 <= wanted <= end:
            raise RowCountMismatch(
                f"stream of {self.field.name!r}: rows end at {end}, kept is {wanted}", end=end, kept=wanted
            )
        for piece in self._windows.rest(0, wanted):
            self._store(piece)
        self._finished = True
        receipt = self._receipt(first, max(first, wanted))
        self._drop_from(wanted)
        self._step.attach_own(receipt)
        return receipt

    def check_finished(self) -> None:
        """Raise ``Conflict`` where rows came and nobody said which of them count."""
        if not self._finished:
            raise Conflict(
                f"commit of step {self._step.id!r}: its stream of {self.field.name!r} is not finished"
            )

    def _store(self, piece: Piece) -> None:
        chunk_id = self._ids.next(self._shard)
        encoded = encode_piece(self._run, self.field, piece, chunk_id)
        self._step.store(self.field, encoded, private=True)
        self._chunks.extend(encoded.receipt.chunks)

    def _receipt(self, first: int, end: int) -> Receipt:
        chunks = [trimmed(chunk, end) for chunk in self._chunks if chunk.start < end]
        run = self._run
        return Receipt(
            run=run.name, epoch=run.epoch, field=self.field.name, start=first, rows=end - first, chunks=chunks
        )

    def _drop_from(self, end: int) -> None:
        """Free chunks without a kept row."""
        surplus = [chunk.chunk_id for chunk in self._chunks if chunk.start >= end]
        if surplus:
            self._step.flush()
            ask(
                self._run.backend,
                DropChunks(run=self._run.name, chunk_ids=each_group(self.field, surplus)),
                Done,
            )

    def _check_open(self, what: str) -> None:
        if self._finished:
            raise Conflict(f"{what} on the stream of {self.field.name!r}: it is finished already")
        self._step.check_open(f"{what} on a stream")


class AsyncStepStream:
    """A stream of an ``async with`` step: the same, awaitable."""

    def __init__(self, stream: StepStream, threads: Threads) -> None:
        self._stream = stream
        self._threads = threads

    async def append(self, start: int, rows: object) -> None:
        """As ``StepStream.append``."""
        await self._threads.call(self._stream.append, start, rows)

    async def finish(self, kept: int | None = None) -> Receipt | None:
        """As ``StepStream.finish``."""
        return await self._threads.call(self._stream.finish, kept)
