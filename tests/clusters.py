"""A cluster of real processes for tests: a catalog, and shards that join it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import arrow_tq
from arrow_tq.calls import ask
from arrow_tq.client import Tls
from arrow_tq_schemas.cluster import ClusterMap, GetCluster
from arrow_tq_schemas.errors import ArrowTQError
from tests.serving import Server, quiet_ports

JOIN_S = 30.0


def map_of(url: str) -> ClusterMap:
    with arrow_tq.connect(url) as store:
        return ask(store._backend, GetCluster(), ClusterMap)


def wait_up(url: str, count: int) -> None:
    """Return when so many shards of the catalog are up."""
    end = time.monotonic() + JOIN_S
    while (up := sum(one.up for one in map_of(url).shards)) != count:
        assert time.monotonic() < end, f"{up} shards are up, not {count}"
        time.sleep(0.1)


def numbers_by_url(url: str, servers: Sequence[str]) -> list[int]:
    """The shard number of each server."""
    known = {one.servers[0].url: one.number for one in map_of(url).shards}
    return [known[server] for server in servers]


class Cluster:
    """A catalog (or a server that is both) and shards, each on a port of its own that it keeps.

    Attributes:
        url: the catalog's.
    """

    def __init__(
        self,
        folder: Path,
        shards: int,
        *arguments: str,
        role: str = "catalog",
        lease_s: float = 2.0,
        token: str | None = None,
        tls: Tls | None = None,
        hosts: bool = False,
    ) -> None:
        """``hosts``: each shard says that it is on a machine of its own, ``host-0`` and so on."""
        self._hosts = hosts
        self._token = token
        self._tls = tls
        self._folder = folder
        self._arguments = arguments
        self._role = role
        self._lease_s = lease_s
        self._catalog_port, *self._ports = quiet_ports(shards + 1)
        self.url = f"grpc{'' if tls is None else '+tls'}://127.0.0.1:{self._catalog_port}"
        self.shards: list[Server] = []
        self.catalog = self.start_catalog()
        try:
            for index in range(shards):
                self.shards.append(self.start_shard(index))
            self.wait()
        except BaseException:
            self.close()
            raise

    def start_catalog(self) -> Server:
        """Start it, or start it again."""
        self.catalog = self._server(
            "catalog", self._catalog_port, "--role", self._role, "--set", f"lease_s={self._lease_s}"
        )
        return self.catalog

    def start_shard(self, index: int) -> Server:
        """Start shard ``index`` (of its folder and port), or start it again."""
        more = ["--set", f"host_id=host-{index}"] if self._hosts else []
        server = self._server(
            f"shard{index}", self._ports[index], "--role", "shard", "--join", self.url, *more
        )
        if index < len(self.shards):
            self.shards[index] = server
        return server

    def start_moved(self, folder: Path) -> Server:
        """A shard that serves a folder with another one's data, on a port of its own."""
        arguments = ("--port", str(quiet_ports(1)[0]), "--role", "shard", "--join", self.url)
        return Server(folder / "data", folder / "memory", *arguments)

    def map(self) -> ClusterMap:
        with arrow_tq.connect(self.url, self._token, tls=self._tls) as store:
            return ask(store._backend, GetCluster(), ClusterMap)

    def number(self, index: int) -> int:
        """The shard number of process ``index``."""
        url = self.shards[index].url
        return next(one.number for one in self.map().shards if one.servers[0].url == url)

    def wait(self, up: int | None = None) -> ClusterMap:
        """Return when so many of the shards outside the catalog are up (all of them)."""
        wanted = len(self._ports) if up is None else up
        end = time.monotonic() + JOIN_S
        while True:
            try:
                found = self.map()
                if sum(one.up for one in found.shards if one.number) == wanted:
                    return found
            except ArrowTQError:
                found = None
            assert time.monotonic() < end, f"{wanted} shards are not up: {found}"
            time.sleep(0.1)

    def close(self) -> None:
        """Kill what still runs, stopped processes too."""
        for server in [*self.shards, self.catalog]:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGKILL)
            server.__exit__(None, None, None)
            server.process.wait(30)

    def _server(self, name: str, port: int, *more: str) -> Server:
        folder = self._folder / name
        arguments = ("--port", str(port), "--set", "drain_s=3", *more, *self._arguments)
        return Server(folder / "data", folder / "memory", *arguments)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
