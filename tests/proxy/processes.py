"""Real processes for the proxy's tests: the proxy itself, and the engine's double."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

from tests.warm import WarmProcess

ROOT = Path(__file__).parents[2]
STOP_S = 30.0


class Process:
    """A process that says where it is on its first line. Killed at the end if it still runs."""

    def __init__(self, log: Path, *command: str, imports: Sequence[str]) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self.process = WarmProcess(*command, stderr=errors, imports=imports)
        line = self.process.stdout.readline()
        words = [word for word in line.split() if word.startswith("http://")]
        if not words:
            self.process.wait(STOP_S)
            raise AssertionError(f"{command} did not start: {line!r} {log.read_text()[-2000:]}")
        self.url = words[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> int:
        """SIGTERM; gives the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(STOP_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.close()


def wait_until_ready(proxy_url: str) -> None:
    """Return when the proxy reaches its store: a busy machine may take longer than its deadline."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if httpx.get(f"{proxy_url}/arrow-tq/readyz", timeout=20).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def upstream(log: Path, *arguments: str) -> Process:
    return Process(log, "-m", "tests.proxy.upstream", *arguments, imports=["tests.proxy.upstream_engine"])


def proxy(log: Path, upstream_url: str, store: str, run: str, *arguments: str, port: int = 0) -> Process:
    """``arrow-tq proxy``; ``arguments`` are further flags."""
    where = ["--upstream", upstream_url, "--store", store, "--run", run, "--port", str(port)]
    return Process(
        log,
        "-m",
        "arrow_tq.cli",
        "proxy",
        *where,
        *arguments,
        imports=["arrow_tq.cli.main", "arrow_tq.proxy.main"],
    )
