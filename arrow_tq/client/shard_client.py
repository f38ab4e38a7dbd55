"""What a client has open to one shard: its connection, its put streams, and the ways around them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from arrow_tq.backend import Read, Rows
from arrow_tq.client.commits import Commits
from arrow_tq.client.connection import Connection
from arrow_tq.client.pending import PendingPut
from arrow_tq.client.puts import Puts
from arrow_tq.client.reads import read
from arrow_tq.client.samehost import HostReads, HostWrites
from arrow_tq.client.samehost.host import Host
from arrow_tq.client.samehost.kept import KeptFiles
from arrow_tq_schemas.errors import DeadlineExceeded, StoreFull, Unreachable

STALL_S = 2.0
"""After so long without an ack it is asked whether the shard is still up."""


class ShardClient:
    """One server of a shard.

    Args:
        number: the shard's.
        epoch: in which this server holds it.
        connection: to the server, connected or not.
        near: whether it may be on this machine; only there it is asked for its memory.
        catalog: where chunks of puts that failed are dropped; None: the server itself.
        kept: mappings of files that come back, shared with other shards; None: of this one alone.
    """

    def __init__(
        self,
        number: int,
        epoch: int,
        connection: Connection,
        near: bool,
        catalog: Host | None = None,
        kept: KeptFiles | None = None,
    ) -> None:
        self.number = number
        self.epoch = epoch
        self.url = connection.url
        self.near = near
        self.connection = connection
        self.puts = Puts(connection)
        self.host = HostReads(connection)
        # What many threads wrote, in several files, is one message and no call.
        self._adopts = Commits(connection)
        adopt = self._adopts.ask_many
        self.writes = HostWrites(connection, self.host.host, self.puts, adopt, catalog, kept)
        self.wire_reads = 0

    def read(self, request: Read) -> Iterator[Rows]:
        """Rows as views of the server's memory where it is on this machine, else by the wire."""
        if self.near and (rows := self.host.read(request)) is not None:
            return rows
        return self.read_by_wire(request)

    def read_by_wire(self, request: Read) -> Iterator[Rows]:
        """Rows as messages."""
        self.wire_reads += 1
        return read(self.connection, request)

    def counters(self) -> Counter[str]:
        """What went around the wire, and what did not."""
        host, writes = self.host, self.writes
        return Counter(
            host_puts=writes.puts,
            host_put_bytes=writes.put_bytes,
            host_reads=host.reads,
            host_read_bytes=host.read_bytes,
            wire_reads=self.wire_reads,
        )

    def close(self, timeout_s: float) -> None:
        """End grants, put streams and the connection, in that order; what is mapped is let go."""
        until = time.monotonic() + timeout_s
        self.writes.close(timeout_s)
        self._adopts.close(max(until - time.monotonic(), 0.0))
        self.puts.close(max(until - time.monotonic(), 0.0))
        self.host.close()
        self.connection.renew()

    def finish(self, timeout_s: float) -> None:
        """Before a fork: the same, in less time."""
        self.writes.close(timeout_s / 2)
        self._adopts.finish(timeout_s / 4)
        self.puts.finish(timeout_s / 4)
        self.host.close()
        self.connection.renew()


class Watcher(Protocol):
    """Who knows which shards are up."""

    def is_down(self, number: int) -> str | None:
        """Where the shard was, if it is known to be down now; None: it may still answer."""

    def suspect(self, number: int) -> None:
        """A call to it failed, or it is full: no new chunks go there for a while."""


class WatchedPut:
    """Implements ``PutHandle``: waits no longer for a shard than it is up."""

    def __init__(self, watcher: Watcher, number: int, handle: PendingPut) -> None:
        self._watcher = watcher
        self._number = number
        self._handle = handle

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every chunk is stored.

        Raises:
            Unreachable: the shard is down; names it. Whether its chunks are stored is not known.
            StoreFull: it has no room; the next chunks go elsewhere.
        """
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            try:
                self._handle.wait(max(0.0, min(left_s, STALL_S)))
            except DeadlineExceeded:
                if self._handle.settled:
                    # Its own error, from a call that took too long.
                    raise
                where = self._watcher.is_down(self._number)
                if where is not None:
                    raise down(self._number, where) from None
                if left_s <= STALL_S:
                    raise
            except (Unreachable, StoreFull):
                # Another one may have room, and is tried first.
                self._watcher.suspect(self._number)
                raise
            else:
                return


def down(number: int, url: str) -> Unreachable:
    """Of a put to a shard that is known not to answer."""
    return Unreachable(f"put: shard {number} at {url} is down", shard=number, url=url)


def after(request: Read, rows: int) -> Read:
    """What is left of a request after its first rows."""
    if not rows:
        return request
    ends = np.cumsum(request.spans["rows"], dtype=np.int64)
    first = int(np.searchsorted(ends, rows, side="right"))
    spans = request.spans[first:].copy()
    if len(spans):
        done = rows - (int(ends[first - 1]) if first else 0)
        for name in ("start", "row"):
            spans[name][0] += done
        spans["rows"][0] -= done
    return replace(request, spans=spans)
