"""Writes into the server's memory: rows are converted into files that it granted, and adopted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from arrow_tq.backend import Header, Place, PutHandle
from arrow_tq.client.connection import Connection
from arrow_tq.client.pending import JoinedPuts, Room
from arrow_tq.client.puts import Puts
from arrow_tq.client.samehost.adopter import Adopt, Adopter, Written
from arrow_tq.client.samehost.granted import Granted, Writer
from arrow_tq.client.samehost.host import Host
from arrow_tq.client.samehost.kept import KeptFiles
from arrow_tq.layout.appender import Reserved
from arrow_tq.layout.columns import Values
from arrow_tq_schemas.commands import Done, DropChunks, EndGrants, GrantsKept, KeepGrants
from arrow_tq_schemas.errors import ArrowTQError
from arrow_tq_schemas.fields import Field

TEND_S = 1.0
"""How often full and idle grants are given back."""
KEEP_S = 8.0
"""How often the others are renewed: well below a lease."""
CLEAN_UP_S = 10.0
"""How long a put that failed waits for its chunks before it drops them; an interrupted one in vain."""
LOCK_WAIT_S = 0.1
"""For other threads' chunks of the same field; after that the wire, which copies more than once."""
LOCK_POLL_S = 0.0003
"""Whoever waits on a lock is handed it, and needs the interpreter too, from a thread that would go on: once
some wait, each put changes threads. Who looks again after a moment costs the others nothing."""
Held = list[tuple[Writer, Granted, Reserved]]


class HostWrites:
    """Implements ``Placer`` for a client on the machine of one server. Thread-safe.

    Args:
        puts: the way of everybody else, for what could not be adopted.
        adopt: how the server is told of chunks in its files, where these do not ride with commits.
        catalog: where chunks are dropped; None: the server itself.
        kept: mappings of files that were full, of all shards of a client; None: of this one.
    """

    def __init__(
        self,
        connection: Connection,
        host: Host,
        puts: Puts,
        adopt: Adopt,
        catalog: Host | None = None,
        kept: KeptFiles | None = None,
    ) -> None:
        options = connection.options
        self._host = host
        self._catalog = catalog or host
        self.kept = kept or KeptFiles()
        self._idle_s = options.stream_idle_s
        self._room = Room(options.put_inflight_bytes_max, options.put_room_s)
        self._lock = threading.Lock()
        self._writers: dict[tuple[str, str], list[Writer]] = {}
        """By run and field, one a layer group."""
        self.adopter = Adopter(host, puts, adopt, self._room.give, self._tend, TEND_S)
        self._kept_at = self._tended_at = 0.0

    @property
    def puts(self) -> int:
        """Chunks written this way."""
        return self.adopter.chunks

    @property
    def put_bytes(self) -> int:
        """Their payload."""
        return self.adopter.nbytes

    def reserve(self, field: Field, run: str, rows: int, header_bytes: int, shard: int) -> HostPlace | None:
        if self._host.proof() is None:
            return None
        writers = self._writers.get((run, field.name)) or self._made(run, field)
        size = rows * sum([writer.layout.row_bytes for writer in writers])
        self._room.take(size)
        held: Held = []
        try:
            for writer in writers:
                if not _lock(writer):
                    break
                try:
                    found = writer.reserve(rows, header_bytes)
                except BaseException:
                    writer.lock.release()
                    raise
                if found is None:
                    writer.lock.release()
                    break
                held.append((writer, *found))
            else:
                return HostPlace(self, held, size, shard)
        except BaseException:
            self._let_go(held, size)
            raise
        self._let_go(held, size)
        return None

    def stored(self, run: str, places: Sequence[Place]) -> PutHandle:
        handles = [place.handle for place in places if isinstance(place, HostPlace)]
        return handles[0] if len(handles) == 1 else JoinedPuts(handles)

    def withdraw(self, run: str, items: Sequence[Written]) -> None:
        """Chunks of a put that failed: once they are adopted they are dropped."""
        for item in items:
            try:
                item.handle.wait(CLEAN_UP_S)
            except ArrowTQError:
                continue
        names = [item.header.chunk_id.hex for item in items]
        try:
            self._catalog.ask(DropChunks(run=run, chunk_ids=names), Done)
        except ArrowTQError:
            # Nothing attached them: the store reaps them itself.
            return

    def give(self, size: int) -> None:
        """Room that a place took and did not use."""
        self._room.give(size)

    def close(self, timeout_s: float) -> None:
        """Have everything adopted, and end the grants."""
        self.adopter.close(timeout_s)
        self.kept.close()
        writers = self._all()
        with self._lock:
            self._writers.clear()
        # Those with chunks still under way end by their lease.
        self._end([one for writer in writers for one in writer.held() if not one.unadopted])

    def _made(self, run: str, field: Field) -> list[Writer]:
        """Writers of a field that was not written to before; those of another thread that came first."""
        with self._lock:
            made = [
                Writer(self._host, run, field, group, self.kept, self.adopter.tend_soon)
                for group in range(len(field.groups))
            ]
            return self._writers.setdefault((run, field.name), made)

    def _all(self) -> list[Writer]:
        with self._lock:
            return [writer for writers in self._writers.values() for writer in writers]

    def _let_go(self, held: Held, size: int) -> None:
        for writer, _, _ in held:
            writer.lock.release()
        self._room.give(size)

    def _tend(self) -> bool:
        """Renew what is in use, end what is idle or full; whether anything is left."""
        mapped = self.kept.tend()
        writers = self._all()
        ended = [one for writer in writers for one in writer.take_done()]
        now = time.monotonic()
        if now < self._tended_at + TEND_S:
            # Called for the full ones: the rest can wait, and for it a writer would have to be waited for.
            self._end(ended)
            return True
        self._tended_at = now
        kept: list[Granted] = []
        for writer in writers:
            if not writer.lock.acquire(timeout=TEND_S):
                # A long chunk is being filled, or its writer was interrupted at the worst moment.
                kept.extend(writer.held())
                continue
            try:
                if writer.used_at < now - self._idle_s:
                    ended.extend(writer.let_go())
                kept.extend(writer.held())
            finally:
                writer.lock.release()
        self._end(ended)
        self._keep(kept)
        return bool(kept) or mapped

    def _keep(self, granted: Sequence[Granted]) -> None:
        proof = self._host.proof() if granted else None
        if proof is None or time.monotonic() < self._kept_at + KEEP_S:
            return
        self._kept_at = time.monotonic()
        try:
            self._host.ask(KeepGrants(proof=proof, grants=[one.grant for one in granted]), GrantsKept)
        except ArrowTQError:
            # What ended meanwhile is found out when it is used: its chunks are then sent.
            return

    def _end(self, granted: Sequence[Granted]) -> None:
        proof = self._host.proof() if granted else None
        if proof is None:
            return
        try:
            self._host.ask(EndGrants(proof=proof, grants=[one.grant for one in granted]), Done)
        except ArrowTQError:
            # They end by their lease.
            return


class HostPlace:
    """Implements ``Place`` over granted files, the locks of their writers held."""

    def __init__(self, writes: HostWrites, held: Held, size: int, shard: int) -> None:
        self.shard = shard
        self._writes = writes
        self._held = held
        self._size = size
        self._items: list[Written] = []
        self.handle = writes.adopter.handle(len(held))

    @property
    def values(self) -> list[Values]:
        return [reserved.values for _, _, reserved in self._held]

    def publish(self, headers: Sequence[Header]) -> None:
        held, size = self._held, self._size
        self._held, self._size = [], 0
        try:
            for (writer, granted, reserved), header in zip(held, headers, strict=True):
                granted.appender.complete(reserved, header.raw)
                self._items.append(Written(writer, granted, reserved, header, self.handle))
            self._writes.adopter.submit(self._items)
        except BaseException:
            self._writes.give(size)
            raise
        finally:
            for writer, _, _ in held:
                writer.lock.release()

    def abandon(self) -> None:
        held, size = self._held, self._size
        self._held, self._size = [], 0
        for writer, _, _ in held:
            writer.lock.release()
        if held:
            self._writes.give(size)

    def withdraw(self) -> None:
        if self._items:
            self._writes.withdraw(self._items[0].writer.run, self._items)


def _lock(writer: Writer) -> bool:
    """Take its lock; False where others had it for ``LOCK_WAIT_S``."""
    if writer.lock.acquire(blocking=False):
        return True
    until = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < until:
        time.sleep(LOCK_POLL_S)
        if writer.lock.acquire(blocking=False):
            return True
    return False
