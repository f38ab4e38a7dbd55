"""Files of the server that this process writes chunks into."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time

import numpy as np
import numpy.typing as npt

from arrow_tq.client.samehost.host import SOON_S, Host
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

    def __init__(self, told: ExtentGrant, layout: ColumnLayout) -> None:
        descriptor = os.open(told.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapping = mmap.mmap(descriptor, told.size_bytes)
        finally:
            os.close(descriptor)
        self.grant = told.grant
        self.size_bytes = told.size_bytes
        self.lease_s = told.lease_s
        self.unadopted = 0
        self._full = False
        self._memory: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)
        self._appender: Appender | None = Appender(self._memory, layout, used_bytes=told.used_bytes)
        threading.Thread(target=self._populate, name="arrow-tq-granted", daemon=True).start()

    @property
    def appender(self) -> Appender:
        """Where chunks are written; not after ``filled``."""
        assert self._appender is not None
        return self._appender

    def filled(self) -> None:
        """Nothing is written any more: its memory goes when the last chunk is adopted."""
        self._full = True
        self.let_go()

    def let_go(self) -> None:
        """Unmap a file that is full and adopted. Whoever still views a chunk of it holds the mapping."""
        if self._full and not self.unadopted:
            self._memory = self._appender = None

    def _populate(self) -> None:
        """Fault memory in ahead of the writer, in one call: between two it waits for the interpreter.

        An older kernel, or a file that was cut, refuses: then whoever writes faults its pages in.
        """
        memory = self._memory
        if memory is not None:
            populate(memory.ctypes.data, self.size_bytes)


class Writer:
    """Where the chunks of one run, field and layer group go. ``reserve`` wants ``lock`` held."""

    def __init__(self, host: Host, run: str, field: Field, group: int) -> None:
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
        self._host = host
        self._next_bytes = GRANT_BYTES[0]
        self._refused_until = 0.0
        self._asking = False

    def reserve(self, rows: int, header_bytes: int) -> tuple[Granted, Reserved] | None:
        """Room for a chunk; None where the server grants none."""
        length = self.layout.plan(rows, False, header_bytes).length
        self.used_at = time.monotonic()
        granted = self.current
        if granted is not None and granted.appender.used_bytes + length + 64 > granted.size_bytes:
            self._filled(granted)
            granted, self.spare = self.spare, None
            if granted is not None and granted.appender.used_bytes + length + 64 > granted.size_bytes:
                self._filled(granted)
                granted = None
            self.current = granted
        if granted is None:
            granted = self.current = self._ask(length)
        if granted is None:
            return None
        if self.spare is None and not self._asking and granted.appender.used_bytes > granted.size_bytes // 2:
            self._asking = True
            threading.Thread(target=self._prepare, args=(length,), name="arrow-tq-grant", daemon=True).start()
        return granted, granted.appender.reserve(rows, header_bytes)

    def held(self) -> list[Granted]:
        """Every file that this writer has."""
        return [*self.full, *(one for one in (self.current, self.spare) if one is not None)]

    def let_go(self) -> list[Granted]:
        """Part with the files that are not needed in a quiet time; with the lock held."""
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
            if granted in self.full:
                self.full.remove(granted)

    def _filled(self, granted: Granted) -> None:
        self.full.append(granted)
        granted.filled()

    def _prepare(self, length: int) -> None:
        """Have the next file ready before the current one is full."""
        spare = self._ask(length)
        with self.lock:
            self.spare, self._asking = spare, False

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
            granted = Granted(told, self.layout)
        except (ArrowTQError, OSError, ValueError) as error:
            if not self._host.forget_stale(error, proof):
                never = isinstance(error, Unsupported)
                self._refused_until = float("inf") if never else time.monotonic() + REFUSED_S
            return None
        self._next_bytes = min(2 * wanted, max(self._next_bytes, GRANT_BYTES[1]))
        return granted
