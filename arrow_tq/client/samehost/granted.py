"""Files of the server that this process writes chunks into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from arrow_tq.client.samehost.host import SOON_S, Host
from arrow_tq.client.samehost.kept import KeptFiles, WritableFile
from arrow_tq.client.samehost.locking import Memory
from arrow_tq.layout.appender import Appender, Reserved
from arrow_tq.layout.columns import ColumnLayout
from arrow_tq.populating import populate
from arrow_tq_schemas.commands import ExtentGrant, GrantExtent
from arrow_tq_schemas.errors import ArrowTQError, Unsupported
from arrow_tq_schemas.fields import Field

MIB = 1 << 20
GRANT_BYTES = (4 * MIB, 32 * MIB)
"""The first file a writer asks for, and the usual largest; each is twice the one before. A writer maps two or
three of them at a time, and the pages that it wrote count as its process's memory."""
GRANT_BYTES_MAX = 64 * MIB
"""Of a file for chunks that are large."""
CHUNKS_A_GRANT = 4
"""Of the largest chunk met so far: a file holds so many at least."""
REFUSED_S = 10.0
"""How long the wire is used after a grant was refused."""


class Granted:
    """One granted file, mapped, under a shared lock for as long as anything of it is viewed.

    Attributes:
        grant: its token.
        unadopted: chunks that are written and that the server has not taken yet.
    """

    def __init__(self, told: ExtentGrant, layout: ColumnLayout, kept: KeptFiles) -> None:
        found = kept.take(told.path, told.size_bytes)
        self._file: WritableFile = found or WritableFile(told.path, told.size_bytes)
        self._kept = kept
        self.grant = told.grant
        self.size_bytes = told.size_bytes
        self.lease_s = told.lease_s
        self.unadopted = 0
        self._full = False
        self._memory: Memory | None = self._file.memory()
        self._appender: Appender | None = Appender(self._memory, layout, used_bytes=told.used_bytes)
        if found is None:
            threading.Thread(target=self._populate, name="arrow-tq-granted", daemon=True).start()

    @property
    def appender(self) -> Appender:
        """Where chunks are written; not after ``filled``."""
        assert self._appender is not None
        return self._appender

    def filled(self) -> bool:
        """Nothing is written any more; whether that lets it go."""
        self._full = True
        return self.let_go()

    def let_go(self) -> bool:
        """Part with a file that is full and adopted; whether it is.

        Its lock goes with the last view of a chunk in it. Its mapping is kept: the file may come back.
        """
        if not self._full or self.unadopted:
            return False
        self._memory = self._appender = None
        self._kept.keep(self._file)
        return True

    def _populate(self) -> None:
        """Fault memory in ahead of the writer, in one call: between two it waits for the interpreter.

        An older kernel, or a file that was cut, refuses: then whoever writes faults its pages in.
        """
        memory = self._memory
        if memory is not None:
            populate(memory.ctypes.data, self.size_bytes)


class Writer:
    """Where the chunks of one run, field and layer group go. ``reserve`` wants ``lock`` held.

    Args:
        kept: where mappings of full files go, and may come back from.
        let_go: called when a file became full whose chunks are all adopted.
    """

    def __init__(
        self, host: Host, run: str, field: Field, group: int, kept: KeptFiles, let_go: Callable[[], None]
    ) -> None:
        self.run = run
        self.field = field
        self.group = group
        self.lock = threading.Lock()
        self.layout = ColumnLayout(field.arrow_schema(group))
        self.current: Granted | None = None
        self.spare: Granted | None = None
        """The file after the current one, asked for when that one is half full."""
        self.full: list[Granted] = []
        """Have no room left, and chunks that are not adopted."""
        self.used_at = time.monotonic()
        self._full_lock = threading.Lock()
        self._host = host
        self._kept = kept
        self._let_go = let_go
        self._next_bytes = GRANT_BYTES[0]
        self._refused_until = 0.0
        self._asked: Future[Granted | None] | None = None
        """The next spare, on its way."""

    def reserve(self, rows: int, header_bytes: int) -> tuple[Granted, Reserved] | None:
        """Room for a chunk; None where the server grants none."""
        plan = self.layout.plan(rows, False, header_bytes)
        length = plan.length
        self.used_at = time.monotonic()
        granted = self.current or self._following(length)
        while granted is not None and granted.appender.used_bytes + length + 64 > granted.size_bytes:
            self._filled(granted)
            granted = self._following(length)
        self.current = granted
        if granted is None:
            return None
        if not self._has_spare() and granted.appender.used_bytes > granted.size_bytes // 2:
            self._asked = asked = Future[Granted | None]()
            threading.Thread(
                target=self._prepare, args=(length, asked), name="arrow-tq-grant", daemon=True
            ).start()
        return granted, granted.appender.reserve_planned(plan)

    def held(self) -> list[Granted]:
        """Every file that this writer has; also without the lock, and then perhaps one twice."""
        asked = self._asked
        ready = asked.result() if asked is not None and asked.done() else None
        return [*self.full, *(one for one in (self.current, self.spare, ready) if one is not None)]

    def take_done(self) -> list[Granted]:
        """Full files whose chunks are all adopted, which belong to the caller; also without the lock."""
        with self._full_lock:
            done = [one for one in self.full if not one.unadopted]
            self.full = [one for one in self.full if one not in done]
        return done

    def let_go(self) -> list[Granted]:
        """Part with the files that are not needed in a quiet time; with the lock held."""
        self._has_spare()
        gone = [one for one in (self.current, self.spare) if one is not None and not one.unadopted]
        self.current = None if self.current in gone else self.current
        self.spare = None if self.spare in gone else self.spare
        return gone

    def lose(self, granted: Granted) -> None:
        """The server knows this grant no more."""
        with self.lock:
            if self.current is granted:
                self.current = None
            if self.spare is granted:
                self.spare = None
            with self._full_lock:
                self.full = [one for one in self.full if one is not granted]

    def _filled(self, granted: Granted) -> None:
        with self._full_lock:
            self.full.append(granted)
        if granted.filled():
            self._let_go()

    def _has_spare(self) -> bool:
        """Whether there is one, or one is on its way."""
        if self._asked is not None and self._asked.done():
            self.spare, self._asked = self._asked.result(), None
        return self.spare is not None or self._asked is not None

    def _following(self, length: int) -> Granted | None:
        """The spare, waited for where it is on its way; else a file that is asked for now."""
        if self._asked is not None:
            wait([self._asked], SOON_S)
        if self._has_spare():
            spare, self.spare = self.spare, None
            return spare
        return self._ask(length)

    def _prepare(self, length: int, asked: Future[Granted | None]) -> None:
        """Have the next file ready before the current one is full."""
        spare = None
        try:
            spare = self._ask(length)
        finally:
            asked.set_result(spare)

    def _ask(self, length: int) -> Granted | None:
        proof = self._host.proof()
        wanted = max(self._next_bytes, -(-CHUNKS_A_GRANT * length // MIB) * MIB)
        if proof is None or time.monotonic() < self._refused_until or wanted > GRANT_BYTES_MAX:
            return None
        command = GrantExtent(
            run=self.run, field=self.field.name, group=self.group, proof=proof, size_bytes=wanted
        )
        try:
            told, _ = self._host.ask(command, ExtentGrant, SOON_S)
            granted = Granted(told, self.layout, self._kept)
        except (ArrowTQError, OSError, ValueError) as error:
            if not self._host.forget_stale(error, proof):
                never = isinstance(error, Unsupported)
                self._refused_until = float("inf") if never else time.monotonic() + REFUSED_S
            return None
        self._next_bytes = min(2 * wanted, max(self._next_bytes, GRANT_BYTES[1]))
        return granted
