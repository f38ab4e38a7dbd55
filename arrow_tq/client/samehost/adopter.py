"""Tells the server which chunks were written into its files, many in one call, on one thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from arrow_tq.backend import Header
from arrow_tq.client.pending import Company, PendingPut
from arrow_tq.client.puts import Puts
from arrow_tq.client.samehost.granted import Granted, Writer
from arrow_tq.client.samehost.host import Host
from arrow_tq.layout.appender import Reserved
from arrow_tq.logs import logger
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.commands import AdoptChunks, AdoptedChunk, ChunkVerdicts, Wire
from arrow_tq_schemas.errors import ArrowTQError, Conflict, InternalError, NotFound, Unavailable, from_wire

CHUNKS_A_CALL_MAX = 256
FILES_A_MESSAGE_MAX = 64
COMPANY = (64, 1 << 20, 0.005)
"""So many chunks, or bytes, or seconds are waited for where nobody waits: a call costs what ten chunks do."""

Adopt = Callable[[Sequence[AdoptChunks]], Sequence[Wire | ArrowTQError]]
"""Tells the server of chunks in its files: each command's reply, or its error in the reply's place."""


@dataclass(slots=True, eq=False)
class Written:
    """One chunk in a granted file, on its way to be adopted."""

    writer: Writer
    granted: Granted
    reserved: Reserved
    header: Header
    handle: PendingPut
    told: bool = False
    """Whether its handle has heard of it, or another thread has taken it over."""

    @property
    def nbytes(self) -> int:
        return self.reserved.values.nbytes

    def chunk(self) -> Chunk:
        """As it would travel."""
        return Chunk(ChunkHeader.from_bytes(self.header.raw), self.reserved.values, None)


class Adopter:
    """One thread, which runs while there is something to adopt or a grant to keep.

    Args:
        settled: told of each chunk that is stored or failed.
        tend: called when nothing came for a while; gives whether there is anything left to look after.
    """

    def __init__(
        self,
        host: Host,
        puts: Puts,
        adopt: Adopt,
        settled: Callable[[Written], None],
        tend: Callable[[], bool],
        period_s: float,
    ) -> None:
        self._host = host
        self._puts = puts
        self._ask = adopt
        self._settled = settled
        self._tend = tend
        self._period_s = period_s
        self._changed = threading.Condition()
        self._queue: deque[Written] = deque()
        self._company = Company(*COMPANY)
        self._busy = 0
        self._tended_at = 0.0
        self._soon = False
        """Whether there is something to look after as soon as nothing is to be adopted."""
        self._running = False
        self._ending = False

    def submit(self, items: Sequence[Written]) -> None:
        """Adopt these; their handles hear of it. Raises ``Conflict`` after ``close``."""
        with self._changed:
            if self._ending:
                raise Conflict("put: the connection was closed")
            wake = False
            for item in items:
                item.granted.unadopted += 1
                wake = self._company.add(item.nbytes) or wake
            self._queue.extend(items)
            self._busy += len(items)
            if not self._running:
                self._running = True
                self._tended_at = time.monotonic()
                threading.Thread(target=self._loop, name="arrow-tq-adopt", daemon=True).start()
            elif wake:
                self._changed.notify_all()

    def hurry(self) -> None:
        """Somebody waits for what was submitted."""
        with self._changed:
            if self._company.hurry():
                self._changed.notify_all()

    def tend_soon(self) -> None:
        """There is something to look after."""
        with self._changed:
            self._soon = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything submitted is settled."""
        self.hurry()
        with self._changed:
            return self._changed.wait_for(lambda: self._busy == 0, max(timeout_s, 0.0))

    def close(self, timeout_s: float) -> None:
        """Settle what there is, and end."""
        self.drain(timeout_s)
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _loop(self) -> None:
        while (files := self._next()) is not None:
            if not files:
                continue
            try:
                self._adopt(files)
            except Exception as error:
                # Whoever waits is told: this thread must not end with chunks in its hands.
                fault = InternalError(f"adopt: {type(error).__name__}: {error}")
                self._settle([(one, fault) for items in files for one in items if not one.told])

    def _next(self) -> list[list[Written]] | None:
        """Chunks by file; an empty list after something else was looked after; None to end."""
        with self._changed:
            due = self._tended_at + self._period_s
            if not self._queue and not self._ending and not self._soon:
                self._changed.wait(max(due - time.monotonic(), 0.0))
            while self._queue and not self._ending and (left := self._company.wait_s) > 0:
                self._changed.wait(left)
            if self._queue and (time.monotonic() < due or self._ending):
                files = [self._take()]
                while self._queue and len(files) < FILES_A_MESSAGE_MAX:
                    files.append(self._take())
                return files
            self._soon = False
        try:
            more = self._tend()
        except Exception:
            # What could not be looked after ends by its lease.
            logger("arrow_tq.client").exception("grants not tended")
            more = True
        self._tended_at = time.monotonic()
        with self._changed:
            if self._ending or (not more and not self._queue):
                self._running = False
                return None
        return []

    def _take(self) -> list[Written]:
        """Under the lock: what waits of the first one's file.

        Steps write several fields in turn, each into a file of its own: neighbours would be a call a chunk.
        """
        granted = self._queue[0].granted
        items: list[Written] = []
        others: list[Written] = []
        while self._queue and len(items) < CHUNKS_A_CALL_MAX:
            item = self._queue.popleft()
            if item.granted is granted:
                items.append(item)
                self._company.take(item.nbytes)
            else:
                others.append(item)
        self._queue.extendleft(reversed(others))
        return items

    def _adopt(self, files: Sequence[Sequence[Written]]) -> None:
        """Ask for all of it in one message, a command a file."""
        proof = self._host.proof()
        outcomes: Sequence[Wire | ArrowTQError]
        if proof is None:
            outcomes = [NotFound("same host: no more") for _ in files]
        else:
            try:
                outcomes = self._ask([_command(items, proof) for items in files])
            except ArrowTQError as error:
                outcomes = [error for _ in files]
        for items, outcome in zip(files, outcomes, strict=True):
            if isinstance(outcome, NotFound | Unavailable):
                # The server was restarted, or takes grants back: what was written is sent instead.
                if proof is not None:
                    self._host.forget_stale(outcome, proof)
                items[0].writer.lose(items[0].granted)
                for item in items:
                    item.told = True
                threading.Thread(
                    target=self._send, args=(items,), name="arrow-tq-resend", daemon=True
                ).start()
                continue
            self._settle(zip(items, _errors(items, outcome), strict=True))

    def _send(self, items: Sequence[Written]) -> None:
        """The way of everybody else."""
        for item in items:
            failure: ArrowTQError | None = None
            try:
                self._puts.put(item.writer.field, [item.chunk()]).wait(None)
            except ArrowTQError as error:
                failure = error
            self._settle([(item, failure)])

    def _settle(self, outcomes: Iterable[tuple[Written, ArrowTQError | None]]) -> None:
        settled: list[Written] = []
        for item, error in outcomes:
            item.told = True
            self._settled(item)
            item.handle.settle(error)
            settled.append(item)
        with self._changed:
            for item in settled:
                item.granted.unadopted -= 1
                self._soon = item.granted.let_go() or self._soon
            self._busy -= len(settled)
            self._changed.notify_all()


def _command(items: Sequence[Written], proof: str) -> AdoptChunks:
    first = items[0]
    told = [AdoptedChunk(offset=one.reserved.offset, header=one.header.raw.decode()) for one in items]
    writer = first.writer
    return AdoptChunks(
        run=writer.run, field=writer.field.name, proof=proof, grant=first.granted.grant, chunks=told
    )


def _errors(items: Sequence[Written], outcome: Wire | ArrowTQError) -> Sequence[ArrowTQError | None]:
    """What became of each chunk of one command; None: it is stored."""
    if isinstance(outcome, ArrowTQError):
        return [outcome] * len(items)
    if not isinstance(outcome, ChunkVerdicts) or len(outcome.errors) != len(items):
        return [InternalError(f"adopt: no verdicts on {len(items)} chunks")] * len(items)
    return [None if wire is None else from_wire(wire) for wire in outcome.errors]
