"""Extents that clients on this machine write, and the chunks in them that this process believes.

A grant is a preallocated file for one client, run, field and layer group. The client appends to its mapping;
nothing of it counts before it is adopted: read with ``pread``, compared with the message that belongs there,
verified, noted in the log, shown. A client that dies or writes rubbish costs its own chunks.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field as slot
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.layout.messages import END_OF_STREAM
from arrow_tq.logs import logger
from arrow_tq.store import adopted
from arrow_tq.store.adopting import Adoption, Verdict
from arrow_tq.store.extent import Extent
from arrow_tq.store.extent_key import ExtentKey
from arrow_tq.store.granted_file import GrantedFile
from arrow_tq.store.stream import Stream, StreamSite
from arrow_tq_schemas.commands import AdoptChunks, ExtentGrant, RunInfo
from arrow_tq_schemas.errors import NotFound, StoreFull
from arrow_tq_schemas.fields import Field

if TYPE_CHECKING:
    from arrow_tq.store.shard import Shard

LEASE_S = 30.0
"""A grant that its client neither uses nor renews for so long ends."""
GRANTS_MAX = 1024
CUT_S, CUT_NOW = 5.0, 1 / 8
"""How long a file keeps blocks that its writer did not use, where they are no more than this part of it. To
give them back and allocate them again costs more than the rest of a grant; a bundle often lives shorter."""
FILL_MAX = 0.7
"""Of the capacity, and of a run's quota, above which nothing is granted: the rest is for chunks that come."""


@dataclass(slots=True, eq=False)
class Grant:
    """One file of one client."""

    token: str
    extent: Extent
    file: GrantedFile
    log: Path
    expires_at: float
    lock: threading.Lock = slot(default_factory=threading.Lock)
    ended: bool = False
    _scratch: npt.NDArray[np.uint8] = slot(default_factory=lambda: np.empty(0, np.uint8))

    def scratch(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory to verify a chunk in, the same each time: fresh pages cost more than the copy. Lock held."""
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A file that nobody is to write to any more, and that may still be mapped by who wrote it."""

    extent: Extent
    file: GrantedFile
    at: float

    def is_due(self, now: float, after_s: float) -> bool:
        """Whether to give back what it did not use: a little waits, as it may soon be granted again."""
        return now >= self.at + after_s or self.extent.rest_bytes > CUT_NOW * self.file.size_bytes

    def cut(self) -> bool:
        """Cut it after its last chunk; False while somebody maps it."""
        with self.file.ending:
            # Once it is retired its file may be another extent's.
            return self.extent.retired or self.file.finish(self.extent.used_bytes, END_OF_STREAM)


class Grants:
    """The grants of a shard. Thread-safe."""

    def __init__(self, site: StreamSite, shard: Shard) -> None:
        self._site = site
        self._shard = shard
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}
        self._unfinished: list[Ended] = []
        self.chunks_adopted = 0
        self.bytes_adopted = 0

    def __len__(self) -> int:
        return len(self._grants)

    def grant(self, field: Field, key: ExtentKey, size_bytes: int) -> ExtentGrant:
        """A file for a client to write to.

        Raises:
            StoreFull: too much is granted or stored already; the client sends its chunks instead.
        """
        site = self._site
        # What is kept for new extents gives way to whatever needs it.
        used_bytes = site.spaces.store.used_bytes - site.recycling.kept_bytes
        if used_bytes + size_bytes > FILL_MAX * site.spaces.store.capacity_bytes:
            raise StoreFull(f"no grant of {size_bytes} bytes above a fill of {FILL_MAX}")
        space = site.spaces.of(key.run)
        run_bytes = space.used_bytes - site.recycling.kept_of(key.run, GrantedFile.pool + key.run)
        if run_bytes + size_bytes > FILL_MAX * space.capacity_bytes:
            raise StoreFull(f"no grant of {size_bytes} bytes above {FILL_MAX} of the quota of {key.run!r}")
        if len(self._grants) >= GRANTS_MAX:
            raise StoreFull(f"no grant: {GRANTS_MAX} are out")
        stream = self._shard.locked_stream(key, field)
        try:
            # Under the lock, so that the key's folders stay.
            extent, file = self._create(stream, size_bytes)
        finally:
            stream.lock.release()
        log = site.roots.adopted(key, extent.number)
        grant = Grant(secrets.token_hex(16), extent, file, log, time.monotonic() + LEASE_S)
        with self._lock:
            self._grants[grant.token] = grant
        return ExtentGrant(
            grant=grant.token,
            path=str(file.path.absolute()),
            size_bytes=size_bytes,
            used_bytes=extent.used_bytes,
            lease_s=LEASE_S,
        )

    def adopt(
        self, command: AdoptChunks, field: Field, info_at: Callable[[int], RunInfo], number: int
    ) -> list[Verdict]:
        """Believe chunks of a grant, each by itself; None for each that is stored, its error otherwise.

        Args:
            info_at: the run's declaration, as new as a chunk's epoch.
            number: of the shard that this is.

        Raises:
            NotFound: the grant has ended, or is another process's.
        """
        grant = self._of(command.grant)
        key = grant.extent.key
        if (key.run, key.field) != (command.run, command.field):
            raise NotFound(f"grant: {command.run!r}, {command.field!r} has none of this id", what="grant")
        with grant.lock:
            if grant.ended:
                raise NotFound("grant: it has ended", what="grant")
            grant.expires_at = time.monotonic() + LEASE_S
            adoption = Adoption(
                grant.extent, grant.file, grant.scratch, field, info_at, number, self._shard.is_here
            )
            verdicts, good = adoption.check(command.chunks)
            if good:
                adopted.append(grant.log, good)
                self._shard.adopt(good)
                self.bytes_adopted += sum(entry.length for _, entry in good)
                self.chunks_adopted += len(good)
            return verdicts

    def keep(self, tokens: Sequence[str]) -> list[str]:
        """Renew grants; gives those that are still there."""
        until = time.monotonic() + LEASE_S
        with self._lock:
            kept = [grant for token in tokens if (grant := self._grants.get(token)) is not None]
        for grant in kept:
            grant.expires_at = until
        return [grant.token for grant in kept]

    def end(self, tokens: Sequence[str]) -> int:
        """Their client writes no more; gives how many that were."""
        with self._lock:
            ended = [grant for token in tokens if (grant := self._grants.pop(token, None)) is not None]
        for grant in ended:
            with grant.lock:
                grant.ended = True
            self.take_over(grant.extent, grant.file)
        return len(ended)

    def take_over(self, extent: Extent, file: GrantedFile) -> None:
        """An extent that nobody is to write to any more; also one of an earlier process."""
        with self._lock:
            self._unfinished.append(Ended(extent, file, time.monotonic()))
        self._shard.seal_granted(extent)

    def maintain(self) -> None:
        """End what expired, and give back what ended grants did not use."""
        now = time.monotonic()
        with self._lock:
            expired = [token for token, grant in self._grants.items() if grant.expires_at < now]
        self.cut(CUT_S)
        if expired:
            logger("arrow_tq.grants").info("grants expired", grants=self.end(expired), after_s=LEASE_S)

    def cut(self, after_s: float) -> None:
        """Give back what files did not use that ended so long ago; a large rest at once."""
        now = time.monotonic()
        with self._lock:
            ended, self._unfinished = self._unfinished, []
        left = [one for one in ended if not (one.is_due(now, after_s) and one.cut())]
        with self._lock:
            self._unfinished.extend(one for one in left if not one.extent.retired)

    def _create(self, stream: Stream, size_bytes: int) -> tuple[Extent, GrantedFile]:
        """The next extent of a stream, with its log and its schema."""
        site, key = self._site, stream.key
        number, stream.next_number = stream.next_number, stream.next_number + 1
        log, path = site.roots.adopted(key, number), site.roots.extent(key, number)
        adopted.create(log)
        try:
            file = self._file(key, path, size_bytes)
        except BaseException:
            log.unlink()
            raise
        extent = Extent.over(key, number, file, stream.schema, stream.layout)
        schema = stream.schema.serialize().to_pybytes()
        file.write(0, schema)
        extent.used_bytes = len(schema)
        site.added(extent)
        return extent, file

    def _file(self, key: ExtentKey, path: Path, size_bytes: int) -> GrantedFile:
        recycled = self._site.recycling.take(GrantedFile.pool + key.run, path, size_bytes)
        if recycled is not None:
            assert isinstance(recycled, GrantedFile)
            return recycled
        try:
            return GrantedFile.create(path, size_bytes, self._site.spaces.of(key.run))
        except StoreFull:
            if not self._site.make_room():
                raise
        return GrantedFile.create(path, size_bytes, self._site.spaces.of(key.run))

    def _of(self, token: str) -> Grant:
        with self._lock:
            grant = self._grants.get(token)
        if grant is None:
            raise NotFound("grant: it has ended, or was another process's", what="grant")
        return grant
