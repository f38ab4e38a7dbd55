"""The SQL worker process as its parent sees it: started, asked, killed, logged."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import IO

from arrow_tq.logs import logger
from arrow_tq.sql_protocol import Channel, Frame, SqlLimits
from arrow_tq_schemas.errors import InternalError, QueryKilled, from_wire

LOG_LINE_BYTES_MAX = 4_096
REAP_S = 10.0
_PASSED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that the worker needs to find its modules; it sees nothing else of our environment."""


class SqlProcess:
    """One worker. Any failure but a refused query ends it: the owner then starts another."""

    def __init__(self, limits: SqlLimits) -> None:
        self._limits = limits
        self._log = logger("arrow_tq.sql")
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "arrow_tq.sql_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(),
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self.alive = True
        assert self._process.stderr is not None
        threading.Thread(
            target=self._copy_log, args=(self._process.stderr,), name="arrow-tq-sql-log", daemon=True
        ).start()
        try:
            self.ask(Frame({"op": "start", "limits": asdict(limits)}), limits.start_s, "starting")
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Frame, timeout_s: float, doing: str) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            QueryKilled: no answer within ``timeout_s``, or the process died; it is dead after that.
            ArrowTQError: what the worker answered instead.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.send(request, deadline)
            answer = self._channel.receive(deadline)
        except TimeoutError:
            self.kill()
            raise QueryKilled(
                f"SQL: the worker was stopped: {doing} took longer than {timeout_s} s", timeout_s=timeout_s
            ) from None
        except (EOFError, OSError):
            raise self._died(doing) from None
        except BaseException:
            # An interrupt in mid-answer: what the worker says next would answer the wrong question.
            self.kill()
            raise
        if "error" not in answer.header:
            return answer
        if answer.header.get("restart"):
            self.kill()
        error = answer.header["error"]
        assert isinstance(error, dict)
        raise from_wire(error)

    def close(self) -> None:
        """End it: by closing the socket, or by force after ``close_s``."""
        self._channel.close()
        try:
            self._process.wait(self._limits.close_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self.alive = False

    def interrupt(self) -> None:
        """Kill the process under a thread that waits in ``ask``, which then raises."""
        self._process.kill()

    def kill(self) -> None:
        self.alive = False
        self._channel.close()
        self._process.kill()
        try:
            self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._log.error("SQL worker does not end", pid=self._process.pid)

    def _died(self, doing: str) -> QueryKilled | InternalError:
        self.kill()
        code = self._process.returncode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        self._log.warning("SQL worker died", pid=self._process.pid, doing=doing, how=how)
        if doing == "starting":
            return InternalError(f"SQL: the worker did not start ({how}); the log has its output")
        return QueryKilled(
            f"SQL: the worker died ({how}) while {doing}; the next query has a fresh one", how=how
        )

    def _copy_log(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in iter(lambda: stderr.readline(LOG_LINE_BYTES_MAX), b""):
                self._log.warning(
                    "SQL worker", pid=self._process.pid, line=line.decode(errors="replace").rstrip()
                )


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    # HOME: DuckDB shows paths below it. Arenas: each reserves address space, which is bounded.
    return {**kept, "HOME": "/", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}
