"""The background threads of a recorder: they hash, split by layer group, store, and free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec

import pyarrow as pa

from arrow_tq.calls import ask
from arrow_tq.producer.encode import Encoded, Encoder
from arrow_tq.recorder.keeper import IDS_A_CALL_MAX
from arrow_tq.recorder.room import Room
from arrow_tq.recorder.window import Piece
from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.commands import Done, DropChunks
from arrow_tq_schemas.errors import ArrowTQError, Conflict, InternalError, from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import StoredChunk

if TYPE_CHECKING:
    from arrow_tq.runs import Run

Args = ParamSpec("Args")
RETRY_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class OneId:
    """The id that a piece was given when it left its window, as a source of ids."""

    chunk_id: ChunkId

    def next(self, shard: int) -> ChunkId:
        return self.chunk_id


def encode_piece(run: Run, field: Field, piece: Piece, chunk_id: ChunkId) -> Encoded:
    """A piece as one chunk of this id (siblings for the other layer groups), in place where that goes."""
    rows: object = piece.values
    if piece.valid is not None:
        shape = list(field.shape)
        kind = pa.fixed_shape_tensor(field.type.arrow, shape) if shape else field.type.arrow
        rows = to_array(piece.values, piece.valid, kind)
    encoder = Encoder(field, run.name, run.epoch, max(piece.values.nbytes, 1))
    return encoder.encode(rows, piece.start, chunk_id.shard, OneId(chunk_id), run.backend.placer)


def each_group(field: Field, ids: Iterable[ChunkId]) -> list[str]:
    """Names of every layer group's chunk."""
    return [one.sibling(group).hex for one in ids for group in range(len(field.groups))]


class Writers:
    """A bounded pool that stores pieces of one run.

    Args:
        run: where to.
        threads: how many pieces are worked on at a time.
        room: the bound on bytes in flight; ``submit`` waits for it.
        store_wait_s: how long a write that the store refuses for now (full, out of reach) is tried again.
    """

    def __init__(self, run: Run, threads: int, room: Room, store_wait_s: float) -> None:
        self._run = run
        self._room = room
        self._store_wait_s = store_wait_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="arrow-tq-recorder")
        self._changed = threading.Condition()
        self._tasks = 0
        self._closing = threading.Event()
        self.chunks = 0
        self.bytes = 0
        self.retries = 0
        self.failed = 0

    def submit(
        self,
        field: Field,
        piece: Piece,
        chunk_id: ChunkId,
        settle: Callable[[StoredChunk | None, ArrowTQError | None], None],
    ) -> None:
        """Store a piece in the background, waiting for room first. ``settle`` hears what became of it.

        Raises:
            DeadlineExceeded: no room for too long; ``settle`` is not called.
            Conflict: the writers were closed.
        """
        size = piece.values.nbytes
        self._room.take(size)
        try:
            self._start(self._write, field, piece, chunk_id, settle)
        except Conflict:
            self._room.give(size)
            raise

    def drop(self, names: list[str]) -> None:
        """Free chunks in the background. Those of a store out of reach are reaped by it in time."""
        if names:
            self._start(self._drop, names)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is being stored or freed; False where something still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued, for so long; False where something was still in flight then."""
        done = self.wait_idle(timeout_s)
        self._closing.set()
        self._pool.shutdown(wait=done)
        return done

    def _start(self, work: Callable[Args, None], *args: Args.args, **named: Args.kwargs) -> None:
        def task() -> None:
            try:
                work(*args, **named)
            finally:
                with self._changed:
                    self._tasks -= 1
                    self._changed.notify_all()

        with self._changed:
            self._tasks += 1
        try:
            self._pool.submit(task)
        except RuntimeError:
            with self._changed:
                self._tasks -= 1
            raise Conflict("the recorder was closed") from None

    # -- in the background ---------------------------------------------------------------------

    def _write(
        self,
        field: Field,
        piece: Piece,
        chunk_id: ChunkId,
        settle: Callable[[StoredChunk | None, ArrowTQError | None], None],
    ) -> None:
        stored, failure = None, None
        try:
            stored = self._store(field, piece, chunk_id)
        except ArrowTQError as error:
            # A copy: the request may raise it in another thread, more than once.
            failure = from_wire(error.to_wire())
        except Exception as error:
            failure = InternalError(f"recording {field.name!r}: {type(error).__name__}: {error}")
        with self._changed:
            if failure is None:
                self.chunks += len(field.groups)
                self.bytes += piece.values.nbytes
            else:
                self.failed += 1
        self._room.give(piece.values.nbytes)
        settle(stored, failure)

    def _store(self, field: Field, piece: Piece, chunk_id: ChunkId) -> StoredChunk:
        """Store all layer groups; again with the same ids while the store cannot."""
        backend = self._run.backend
        until = time.monotonic() + self._store_wait_s
        while True:
            try:
                encoded = encode_piece(self._run, field, piece, chunk_id)
                handles = [backend.put(field, chunks) for chunks in encoded.chunks_by_group if chunks]
                if encoded.places and backend.placer is not None:
                    handles.append(backend.placer.stored(self._run.name, encoded.places))
                for handle in handles:
                    handle.wait(self._run.put_timeout_s)
            except ArrowTQError as error:
                if not error.retryable or time.monotonic() >= until or self._closing.is_set():
                    raise
            else:
                (stored,) = encoded.receipt.chunks
                return stored
            with self._changed:
                self.retries += 1
            self._closing.wait(RETRY_PAUSE_S)

    def _drop(self, names: list[str]) -> None:
        for first in range(0, len(names), IDS_A_CALL_MAX):
            part = names[first : first + IDS_A_CALL_MAX]
            try:
                ask(self._run.backend, DropChunks(run=self._run.name, chunk_ids=part), Done)
            except ArrowTQError:
                # Nothing attached them: a store out of reach reaps them itself.
                return
