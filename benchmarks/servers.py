"""Server processes that the wire benchmarks talk to: ours, and a bare pyarrow Flight server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import arrow_tq
from arrow_tq.calls import ask
from arrow_tq_schemas.cluster import ClusterMap, GetCluster

STOP_S = 20.0
JOIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Site:
    """A store of several processes."""

    url: str
    pids: list[int]


@contextmanager
def _process(arguments: list[str]) -> Iterator[str]:
    """Start a server that prints its URL as the third word of its first line; stop it at the end."""
    with _started(arguments) as (url, _):
        yield url


@contextmanager
def _started(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """The same, and its process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if len(words) < 3:
            raise RuntimeError(f"{arguments[0]} did not start")
        yield words[2], process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def ours(data_root: str | None = None) -> Iterator[str]:
    """A store's server with its memory in /dev/shm; gives its URL."""
    with (
        tempfile.TemporaryDirectory(dir=data_root) as data,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        folders = ["--data-dir", data, "--memory-dir", str(Path(memory) / "memory")]
        with _process(["arrow_tq_server", *folders, "--port", "0", "--http-port", "0"]) as url:
            yield url


@contextmanager
def cluster(shards: int) -> Iterator[Site]:
    """A catalog and so many shards on this machine; with none, one server that is everything."""
    with ExitStack() as stack:

        def start(*arguments: str) -> tuple[str, int]:
            data = stack.enter_context(tempfile.TemporaryDirectory())
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            folders = ["--data-dir", data, "--memory-dir", str(Path(memory) / "memory")]
            ports = ["--port", "0", "--http-port", "0"]
            return stack.enter_context(_started(["arrow_tq_server", *folders, *ports, *arguments]))

        url, pid = start("--role", "catalog") if shards else start()
        pids = [pid, *(start("--role", "shard", "--join", url)[1] for _ in range(shards))]
        _wait_up(url, shards)
        yield Site(url, pids)


def _wait_up(url: str, shards: int) -> None:
    end = time.monotonic() + JOIN_S
    with arrow_tq.connect(url) as store:
        while shards and sum(one.up for one in ask(store._backend, GetCluster(), ClusterMap).shards) < shards:
            if time.monotonic() > end:
                raise RuntimeError(f"{shards} shards did not join in {JOIN_S} s")
            time.sleep(0.05)


@contextmanager
def bare() -> Iterator[str]:
    """A server of plain pyarrow Flight that keeps what it is given and gives it back."""
    with _process(["benchmarks.bare_flight"]) as url:
        yield url


@contextmanager
def bare_unix() -> Iterator[str]:
    """The same over a Unix socket."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _process(["benchmarks.bare_flight", str(Path(folder) / "socket")]) as url,
    ):
        yield url
