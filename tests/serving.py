"""A real server process for tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from tests.warm import DUMP_SIGNAL, WarmProcess

START_S = 30.0
STOP_S = 30.0
QUIET_PORTS = (10_000, 32_000)


def quiet_ports(count: int) -> list[int]:
    """Free ports below those that outgoing connections get: nobody takes them while a process restarts."""
    chance, found = random.SystemRandom(), []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            listener = held.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", chance.randrange(*QUIET_PORTS)))
            except OSError:
                continue
            found.append(listener.getsockname()[1])
    return found


class Server:
    """``python -m arrow_tq_server`` on free ports. Killed at the end if it still runs.

    Attributes:
        url: where its Flight port is.
        http_url: where its HTTP port is.
    """

    def __init__(
        self,
        data_dir: Path,
        memory_dir: Path,
        *arguments: str,
        start: Literal["warm", "cold"] = "warm",
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it, and return when it serves.

        Args:
            start: ``cold`` starts an interpreter of its own, and so has this process's limits.
            prefix: a command that runs the server, such as one that changes the network; always cold.
        """
        self.data_dir = data_dir
        self.memory_dir = memory_dir
        self.log = data_dir.with_name(f"{data_dir.name}.log")
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        folders = ["--data-dir", str(data_dir), "--memory-dir", str(memory_dir)]
        ports = ["--host", "127.0.0.1", "--port", "0", "--http-port", "0"]
        with self.log.open("ab") as log:
            self.process: subprocess.Popen[str] | WarmProcess
            if start == "cold" or prefix:
                command = [*prefix, sys.executable, "-m", "arrow_tq_server", *folders, *ports, *arguments]
                self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            else:
                self.process = WarmProcess("-m", "arrow_tq_server", *folders, *ports, *arguments, stderr=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        words = line.split()
        if len(words) < 4:
            self.process.wait(START_S)
            raise AssertionError(f"the server did not start: {line!r} {self.log.read_text()[-2000:]}")
        self.url, self.http_url = words[2], words[3]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM; gives the exit code. One that does not end says what it does instead."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, DUMP_SIGNAL)
            time.sleep(1)
            raise AssertionError(f"the server does not stop: {self.log.read_text()[-20_000:]}") from None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            # By its descriptor: it may have ended since, and its process id be another's.
            self.process.kill()
            self.process.wait(STOP_S)
        if isinstance(self.process, WarmProcess):
            self.process.close()
        elif self.process.stdout is not None:
            self.process.stdout.close()
