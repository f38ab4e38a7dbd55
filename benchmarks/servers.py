"""Server processes that the wire benchmarks talk to: ours, and a bare pyarrow Flight server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOP_S = 20.0


@contextmanager
def _process(arguments: list[str]) -> Iterator[str]:
    """Start a server that prints its URL as the third word of its first line; stop it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if len(words) < 3:
            raise RuntimeError(f"{arguments[0]} did not start")
        yield words[2]
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
