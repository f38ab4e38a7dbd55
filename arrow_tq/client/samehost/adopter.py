"""Tells the server which chunks were written into its files, many in one call or message."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from arrow_tq.backend import Header
from arrow_tq.client.pending import Company, PendingPut
from arrow_tq.client.puts import Puts
from arrow_tq.client.riding import Rider, RidingPut
from arrow_tq.client.samehost.granted import Granted, Writer
from arrow_tq.client.samehost.host import Host
from arrow_tq.layout.appender import Reserved
from arrow_tq.logs import logger
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.commands import AdoptChunks, AdoptedChunk, ChunkVerdicts, Wire
from arrow_tq_schemas.errors import ArrowTQError, Conflict, InternalError, NotFound, Unavailable, from_wire
from arrow_tq_schemas.trusted import trusted

CHUNKS_A_CALL_MAX = 256
FILES_A_MESSAGE_MAX = 64
COMPANY = (64, 1 << 20, 0.005)
"""So many chunks, or bytes, or seconds are waited for where nobody waits: a call costs what ten chunks do."""

RIDING = (64, 2 << 20, 0.02)
"""The same where chunks go along with their step's commit, which is likely to come soon."""
LEFT_S = 0.05
"""How soon a message that was asked for has taken what waits; after that another one is asked for."""

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
        return self.reserved.plan.values_bytes

    def chunk(self) -> Chunk:
        """As it would travel."""
        return Chunk(ChunkHeader.from_bytes(self.header.raw), self.reserved.values, None)


class Adopter:
    """One thread, which runs while there is something to adopt or a grant to keep.

    It makes the calls itself, or (``ride``) only sees to it that nothing waits too long for the messages of
    a commit stream, whose thread then takes what waits (``load``). Chunks of a file are told of in order:
    all of it goes one way.

    Args:
        settled: told of the payload bytes of chunks that are stored or failed.
        tend: called when nothing came for a while; gives whether there is anything left to look after.

    Attributes:
        chunks: how many were submitted.
        nbytes: their payload.
    """

    def __init__(
        self,
        host: Host,
        puts: Puts,
        adopt: Adopt,
        settled: Callable[[int], None],
        tend: Callable[[], bool],
        period_s: float,
    ) -> None:
        self._host = host
        self._puts = puts
        self._ask = adopt
        self._settled = settled
        self._tend = tend
        self._period_s = period_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        """Told when nothing is under way."""
        self._leave: Callable[[], None] | None = None
        self._lingers = False
        """Whether the thread waits for company, and will look at what came meanwhile."""
        self._queue: deque[Written] = deque()
        self._company = Company(*COMPANY)
        self._busy = 0
        self._tended_at = 0.0
        self._soon = False
        """Whether there is something to look after as soon as nothing is to be adopted."""
        self._loads = 0
        self._asked = False
        """Whether the thread waits for a message that it asked for."""
        self._running = False
        self._ending = False
        self.chunks = 0
        self.nbytes = 0

    def ride(self, leave: Callable[[], None]) -> None:
        """From now on chunks are taken by ``load``; before the first put.

        Args:
            leave: has that done at once, by another thread; raises ``Conflict`` where nobody will any more.
        """
        self._leave = leave
        self._company = Company(*RIDING)

    def handle(self, chunks: int) -> PendingPut:
        """For so many chunks that will be submitted."""
        kind = PendingPut if self._leave is None else RidingPut
        return kind(chunks, self.hurry)

    def submit(self, items: Sequence[Written]) -> None:
        """Adopt these; their handles hear of it. Raises ``Conflict`` after ``close``."""
        with self._lock:
            if self._ending:
                raise Conflict("put: the connection was closed")
            wake = False
            for item in items:
                item.granted.unadopted += 1
                wake = self._company.add(item.nbytes) or wake
                self.nbytes += item.nbytes
            self._queue.extend(items)
            self._busy += len(items)
            self.chunks += len(items)
            enough = self._company.is_enough
            leave = self._leave if enough else None
            if not self._running:
                self._running = True
                self._tended_at = time.monotonic()
                threading.Thread(target=self._loop, name="arrow-tq-adopt", daemon=True).start()
            elif wake and leave is None and (enough or not self._lingers):
                self._changed.notify_all()
        if leave is not None:
            # Right away: the thread would have to wait for the interpreter first.
            self._depart(leave)

    def hurry(self) -> None:
        """Somebody waits for what was submitted."""
        with self._changed:
            hurried = self._company.hurry()
            if hurried and self._leave is None:
                self._changed.notify_all()
        if hurried and self._leave is not None:
            self._depart(self._leave)

    def tend_soon(self) -> None:
        """There is something to look after."""
        with self._changed:
            self._soon = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything submitted is settled."""
        self.hurry()
        with self._idle:
            return self._idle.wait_for(lambda: self._busy == 0, max(timeout_s, 0.0))

    def close(self, timeout_s: float) -> None:
        """Settle what there is, and end."""
        self.drain(timeout_s)
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def load(self) -> list[Rider]:
        """What waits, a command a file: it is on its way from now on."""
        with self._lock:
            files = self._files()
            self._loads += 1
            if self._asked:
                # Not one that lingers: it looks at what is left then when its time is over.
                self._changed.notify_all()
        # Not asked for now: that may take a while, and a server that has to be found anew knows no grant.
        proof = self._host.known_proof
        if proof is not None:
            return [Rider(_command(items, proof), partial(self._answered, items, proof)) for items in files]
        for items in files:
            self._resend(items)
        return []

    def _depart(self, leave: Callable[[], None]) -> None:
        """Have what waits leave."""
        try:
            leave()
        except ArrowTQError as error:
            with self._changed:
                files = self._files()
            for items in files:
                self._settle([(one, error) for one in items])

    def _loop(self) -> None:
        while (files := self._next()) is not None:
            if not files:
                continue
            try:
                self._adopt(files)
            except Exception as error:
                self._fault(files, error)
            # Not held while nothing comes: chunks view the files that they are in.
            del files

    def _fault(self, files: Sequence[Sequence[Written]], error: Exception) -> None:
        """Whoever waits is told: a thread must not end with chunks in its hands."""
        fault = InternalError(f"adopt: {type(error).__name__}: {error}")
        self._settle([(one, fault) for items in files for one in items if not one.told])

    def _next(self) -> list[list[Written]] | None:
        """Chunks by file; an empty list after something else was looked after; None to end."""
        with self._changed:
            due = self._tended_at + self._period_s
            if not self._queue and not self._ending and not self._soon:
                self._changed.wait(max(due - time.monotonic(), 0.0))
            self._lingers = True
            while self._queue and not self._ending and (left := self._company.wait_s) > 0:
                self._changed.wait(left)
            self._lingers = False
            ready = bool(self._queue) and (time.monotonic() < due or self._ending)
            if ready and self._leave is None:
                return self._files()
            if not (ready or self._soon or self._ending) and time.monotonic() < due:
                # It left meanwhile with somebody's commit.
                return []
            self._soon = self._soon and ready
            loads = self._loads
        if ready and self._leave is not None:
            self._depart(self._leave)
            with self._changed:
                # Not until nothing waits: a writer that goes on would keep it waiting.
                self._asked = True
                self._changed.wait_for(lambda: self._loads != loads or not self._queue, LEFT_S)
                self._asked = False
            return []
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

    def _files(self) -> list[list[Written]]:
        """Under the lock: what one message takes, by file."""
        files: list[list[Written]] = []
        while self._queue and len(files) < FILES_A_MESSAGE_MAX:
            files.append(self._take())
        return files

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
            self._heard(items, proof, outcome)

    def _answered(self, items: Sequence[Written], proof: str, outcome: Wire | ArrowTQError) -> None:
        """As ``_heard``; the thread that calls it must not end."""
        try:
            self._heard(items, proof, outcome)
        except Exception as error:
            self._fault([items], error)

    def _heard(self, items: Sequence[Written], proof: str | None, outcome: Wire | ArrowTQError) -> None:
        """What became of one command."""
        if not isinstance(outcome, NotFound | Unavailable):
            self._settle(zip(items, _errors(items, outcome), strict=True))
            return
        # The server was restarted, or takes grants back: what was written is sent instead.
        if proof is not None:
            self._host.forget_stale(outcome, proof)
        self._resend(items)

    def _resend(self, items: Sequence[Written]) -> None:
        for item in items:
            item.told = True
        threading.Thread(target=self._send, args=(items,), name="arrow-tq-resend", daemon=True).start()

    def _send(self, items: Sequence[Written]) -> None:
        """The way of everybody else."""
        # Here, since it may wait: whoever writes into the file has the lock.
        items[0].writer.lose(items[0].granted)
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
            item.handle.settle(error)
            settled.append(item)
        self._settled(sum([item.nbytes for item in settled]))
        with self._lock:
            for item in settled:
                item.granted.unadopted -= 1
                if item.granted.let_go() and not self._soon:
                    self._soon = True
                    self._changed.notify_all()
            self._busy -= len(settled)
            if not self._busy:
                self._idle.notify_all()


def _command(items: Sequence[Written], proof: str) -> AdoptChunks:
    first = items[0]
    told = [
        trusted(AdoptedChunk, {"offset": one.reserved.offset, "header": one.header.raw.decode()})
        for one in items
    ]
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
