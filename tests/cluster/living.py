"""Watches the servers that live on through a fault: what waits for the dead must not pile up in them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

import psutil

from tests.serving import Server

PERIOD_S = 0.1
THREADS_MORE = 12
"""That come and go with the load itself; calls that wait for the dead would be many more."""
MEMORY_MORE = 64 << 20


class Living:
    """While it is entered: the most threads, and the most memory of its own, that each process has.

    Memory that is mapped from files (extents) is payload and not counted.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self._processes = [psutil.Process(server.pid) for server in servers]
        self._before = [_figures(process) for process in self._processes]
        self._most = list(self._before)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Living:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            self._check()

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self._most = [
                (max(most[0], now[0]), max(most[1], now[1]))
                for most, now in zip(self._most, map(_figures, self._processes), strict=True)
            ]

    def _check(self) -> None:
        for process, before, most in zip(self._processes, self._before, self._most, strict=True):
            name = " ".join(process.cmdline())
            assert most[0] <= before[0] + THREADS_MORE, f"threads: {before[0]}, then {most[0]}: {name}"
            assert most[1] <= before[1] + MEMORY_MORE, f"bytes: {before[1]}, then {most[1]}: {name}"


def _figures(process: psutil.Process) -> tuple[int, int]:
    memory = process.memory_info()
    return process.num_threads(), memory.rss - memory.shared
