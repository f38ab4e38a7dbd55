"""Puts: chunks go out on streams by (run, field, layer group), within a bound of bytes in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from arrow_tq.client.connection import Connection
from arrow_tq.client.pending import Item, PendingPut, Room
from arrow_tq.client.put_stream import ChunkSender
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.errors import ArrowTQError, Conflict
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.tickets import PutStream

Key = tuple[str, str, int]


class Puts:
    """The put streams of one connection."""

    def __init__(self, connection: Connection) -> None:
        options = connection.options
        self._connection = connection
        self._room = Room(options.put_inflight_bytes_max, options.put_room_s)
        self._lock = threading.Lock()
        self._senders: dict[Key, list[ChunkSender]] = {}
        self._closed = False

    @property
    def waits(self) -> int:
        """How many puts had to wait for room."""
        return self._room.waits

    @property
    def waited_s(self) -> float:
        """How long they waited, all together."""
        return self._room.waited_s

    @property
    def in_flight_bytes(self) -> int:
        return self._room.used_bytes

    def put(self, field: Field, chunks: Sequence[Chunk]) -> PendingPut:
        """Hand chunks over, waiting for room where there is none."""
        handle = PendingPut(len(chunks), self.hurry)
        for chunk in chunks:
            self._room.take(chunk.nbytes)
            self._hand_over(Item(field, chunk, handle))
        return handle

    def hurry(self) -> None:
        """Somebody waits: small chunks that wait for others leave now."""
        with self._lock:
            senders = [sender for some in self._senders.values() for sender in some]
        for sender in senders:
            sender.hurry()

    def finish(self, timeout_s: float) -> None:
        """End all streams once they have sent what they hold, waiting for so long. New puts open others."""
        with self._lock:
            senders = [sender for some in self._senders.values() for sender in some]
            self._senders.clear()
        until = time.monotonic() + timeout_s
        for sender in senders:
            sender.finish()
        for sender in senders:
            sender.join(until - time.monotonic())

    def close(self, timeout_s: float) -> None:
        """End for good."""
        with self._lock:
            self._closed = True
        self.finish(timeout_s)

    def _send(self, item: Item) -> None:
        header = item.chunk.header
        key = (header.run, header.field, header.chunk_id.group)
        with self._lock:
            if self._closed:
                raise Conflict(f"put: the connection to {self._connection.url} was closed")
            senders = self._senders.setdefault(key, [])
            while True:
                sender = self._least_busy(senders)
                if sender is None:
                    stream = PutStream(run=key[0], field=key[1], group=key[2])
                    sender = ChunkSender(self._connection, stream, item.field, self._settled, self._left)
                    senders.append(sender)
                if sender.send(item):
                    return
                senders.remove(sender)

    def _least_busy(self, senders: Sequence[ChunkSender]) -> ChunkSender | None:
        """The stream for the next chunk; None where another one should be opened."""
        options = self._connection.options
        best = min(senders, key=lambda sender: sender.backlog_bytes, default=None)
        if best is not None and best.backlog_bytes > options.ack_window_bytes:
            return best if len(senders) >= options.put_streams else None
        return best

    def _settled(self, item: Item, error: ArrowTQError | None) -> None:
        self._room.give(item.nbytes)
        item.handle.settle(error)

    def _left(self, items: Sequence[Item], error: ArrowTQError | None) -> None:
        """Send again what an ended stream left: freely where it only grew old, once where it broke.

        A chunk that is stored already is known by its id.
        """
        again = [item for item in items if error is None or (error.retryable and not item.resent)]
        if error is not None and again:
            time.sleep(self._connection.options.retry_pause_s)
            self._connection.renew()
        for item in items:
            if item in again:
                item.resent = error is not None
                self._hand_over(item)
            else:
                self._settled(item, error)

    def _hand_over(self, item: Item) -> None:
        try:
            self._send(item)
        except Conflict as closed:
            self._settled(item, closed)
