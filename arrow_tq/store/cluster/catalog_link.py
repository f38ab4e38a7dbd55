"""A shard's calls to the catalog that it joined. While that is away, what is known goes on being true."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TypeVar

from arrow_tq.client.connection import Connection
from arrow_tq_schemas.blobs import BLOB_FIELD
from arrow_tq_schemas.bundles import BUNDLE_FIELD
from arrow_tq_schemas.cluster import (
    Beat,
    ChunkStates,
    ClusterMap,
    GetCluster,
    GetRun,
    JoinCluster,
    Joined,
    LeaveCluster,
    News,
    States,
)
from arrow_tq_schemas.commands import Command, Done, GetSegments, Reply, RunInfo, Wire, unpack_reply
from arrow_tq_schemas.errors import DeadlineExceeded, InternalError, NotFound, Unavailable, Unreachable
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId

Body = TypeVar("Body", bound=Wire)
CALL_S = 10.0
BEAT_S = 3.0
"""Deadline of one beat."""
LEAVE_S = 2.0
RUN_S = 5.0
"""Age at which a run's declaration, with its epoch, is asked again."""
AGAIN_S = 2.0
"""Deadline of asking again for what is known: nobody waits long for it."""
IDS_MAX = 50_000
"""Chunk ids in one question."""


class CatalogLink:
    """Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self.url = connection.url
        self._connection = connection
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[float, RunInfo]] = {}

    def run_info(self, run: str, epoch: int = 0) -> RunInfo:
        """The run's declaration; asked anew where it is old, or older than ``epoch``.

        Raises:
            NotFound: no such run.
            Unavailable: the catalog is away, and the run was never seen.
        """
        known = self._runs.get(run)
        if known is not None and time.monotonic() - known[0] < RUN_S and known[1].epoch >= epoch:
            return known[1]
        if known is None:
            return self._refreshed(run)
        try:
            return self._refreshed(run, AGAIN_S)
        except Unavailable:
            # It goes on being true, and is not asked for again at once: each call would wait for it.
            return self._noted(run, known[1])

    def _refreshed(self, run: str, deadline_s: float = CALL_S) -> RunInfo:
        return self._noted(run, self._body(GetRun(run=run), RunInfo, deadline_s))

    def _noted(self, run: str, info: RunInfo) -> RunInfo:
        with self._lock:
            self._runs[run] = time.monotonic(), info
        return info

    def forget(self) -> None:
        """What is known of runs: another catalog, which may have other ones, has taken its place."""
        with self._lock:
            self._runs.clear()

    def field(self, run: str, name: str) -> Field:
        """The declared field, or that of blobs or bundles; raises ``NotFound`` naming those there are."""
        if name == BLOB_FIELD.name:
            return BLOB_FIELD
        if name == BUNDLE_FIELD.name:
            return BUNDLE_FIELD
        declared = {str(one["name"]): one for one in self.run_info(run).fields}
        if name not in declared:
            declared = {str(one["name"]): one for one in self._refreshed(run).fields}
        if name not in declared:
            raise NotFound(f"run {run!r} has no field {name!r}; it has {', '.join(declared)}", field=name)
        return Field.from_json(declared[name])

    def chunk_states(self, ids: Sequence[ChunkId], run: str | None = None) -> list[str | None]:
        """committed, released, held, or None where no step attached it, or none of ``run``."""
        states: list[str | None] = []
        for first in range(0, len(ids), IDS_MAX):
            names = [one.hex for one in ids[first : first + IDS_MAX]]
            states += self._body(ChunkStates(ids=names, run=run), States).states
        return states

    def segments(self, command: GetSegments) -> Reply:
        """Metadata and manifests of segments."""
        return self._ask(command, CALL_S)

    def cluster(self) -> Reply:
        """The map."""
        return self._ask(GetCluster(), CALL_S)

    def cluster_map(self) -> ClusterMap:
        """The same, as it is."""
        return self._body(GetCluster(), ClusterMap)

    def join(self, command: JoinCluster) -> Joined:
        """See ``JoinCluster``."""
        return self._body(command, Joined)

    def beat(self, command: Beat) -> News:
        """See ``Beat``."""
        return self._body(command, News, BEAT_S + command.wait_s)

    def leave(self, command: LeaveCluster) -> None:
        """See ``LeaveCluster``. Nobody waits for a catalog that is away."""
        self._body(command, Done, LEAVE_S)

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.renew()

    def _body(self, command: Command, kind: type[Body], deadline_s: float = CALL_S) -> Body:
        body = self._ask(command, deadline_s).body
        if not isinstance(body, kind):
            raise InternalError(f"catalog {self.url}: not the reply to {command.verb}")
        return body

    def _ask(self, command: Command, deadline_s: float) -> Reply:
        raw = command.model_dump_json().encode()
        try:
            answer = self._connection.retrying(lambda: self._connection.action(command.verb, raw, deadline_s))
        except (Unreachable, DeadlineExceeded) as error:
            raise Unavailable(f"the catalog at {self.url} is out of reach: {error.message}") from None
        return unpack_reply(command, answer)
