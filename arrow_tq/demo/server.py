"""A server process for the demonstration, in directories that go with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arrow_tq_schemas.errors import InternalError, Unsupported

START_S = 30.0
"""How long the server may take to come up."""
STOP_S = 10.0
"""How long it may take to drain before it is killed."""
POLL_S = 0.05
MEMORY_ROOT = Path("/dev/shm")
LOG_CHARS = 2000


class DemoServer:
    """``python -m arrow_tq_server`` on a free port. A context manager: nothing stays behind.

    Attributes:
        url: where it listens.
        directory: a scratch directory that is deleted with it.
    """

    def __init__(self) -> None:
        self.url = ""
        self.directory = Path(tempfile.mkdtemp(prefix="arrow-tq-demo-"))
        memory_root = MEMORY_ROOT if os.access(MEMORY_ROOT, os.W_OK) else None
        self._memory = Path(tempfile.mkdtemp(prefix="arrow-tq-demo-", dir=memory_root))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DemoServer:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process and delete its directories. Idempotent."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for path in (self.directory, self._memory):
            shutil.rmtree(path, ignore_errors=True)

    def _start(self) -> None:
        data = self.directory / "data"
        where = ["--data-dir", str(data), "--memory-dir", str(self._memory)]
        ports = ["--host", "127.0.0.1", "--port", "0", "--http-port", "0"]
        command = [sys.executable, "-m", "arrow_tq_server", *where, *ports]
        # Settings of a server that the caller runs are not meant for this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ARROW_TQ_")}
        with (self.directory / "server.log").open("wb") as log:
            # A session of its own: Ctrl-C is for us, and we end the server in order.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            self.url = _url(data / "server.json")
            if self.url:
                return
            if self._process.poll() is not None:
                raise self._failed(f"ended with code {self._process.returncode}")
            time.sleep(POLL_S)
        raise self._failed(f"did not come up in {START_S:.0f} s")

    def _failed(self, what: str) -> InternalError | Unsupported:
        log = (self.directory / "server.log").read_text(errors="replace").strip()
        last = log.splitlines()[-1] if log else "its log is empty"
        if "ModuleNotFoundError" in last:
            return Unsupported(f"the server needs more packages: pip install 'arrow-tq[server]' ({last})")
        return InternalError(f"the server {what}: {last[:LOG_CHARS]}")


def _url(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        # Not written yet, or not whole.
        return ""
    url = found.get("url") if isinstance(found, dict) else None
    return url if isinstance(url, str) else ""
