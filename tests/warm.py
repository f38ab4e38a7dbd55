"""Processes that start at once: forked from one that has imported what they would import first.

Starting the interpreter and importing the server takes a second of CPU; a fork takes some milliseconds. What
runs is the same module or code, as ``__main__``, with a process id, descriptors and signals of its own. One
parent serves a test process; it runs this file, has no threads of Python's, and ends with the test process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

ROOT = Path(__file__).parents[1]
REQUEST_BYTES_MAX = 1 << 17
STOP_S = 30.0
FINISH_S = 60.0
DUMP_SIGNAL = signal.SIGUSR2
"""A warm process that gets it prints the stack of each thread to its standard error."""
PRELOADED = (
    "arrow_tq_server.main",
    "pandas",
    "sqlglot.dialects.duckdb",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.h11_impl",
)
"""What a server imports until it serves."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a process runs, and where."""

    command: list[str]
    env: dict[str, str]
    folder: str
    imports: list[str]


class WarmProcess:
    """``python -m MODULE ...`` or ``python -c CODE ...``, with what tests use of ``subprocess.Popen``.

    Attributes:
        pid: its process id.
        stdin: what it reads.
        stdout: what it prints.
        returncode: its exit code, negative for a signal; None until ``poll`` or ``wait`` saw its end.
    """

    def __init__(
        self,
        *command: str,
        stderr: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """Start it.

        Args:
            command: the interpreter's arguments, with ``-m`` or ``-c`` first.
            stderr: where its standard error goes; where ours does.
            env: its environment; ours.
            imports: modules that it would import, for the parent to have before it forks.
        """
        assert command[0] in ("-m", "-c")
        self.args = command
        self.returncode: int | None = None
        self._looking = threading.Lock()
        child_input, own_input = os.pipe()
        output, child_output = os.pipe()
        self._ended, child_ended = os.pipe()
        self.stdin = os.fdopen(own_input, "w", encoding="utf-8")
        self.stdout = os.fdopen(output, encoding="utf-8")
        errors = 2 if stderr is None else stderr.fileno()
        try:
            wanted = Wanted(list(command), dict(env or os.environ), str(Path.cwd()), list(imports))
            self.pid, self._pidfd = _parent().fork(wanted, (child_input, child_output, errors, child_ended))
        finally:
            for descriptor in (child_input, child_output, child_ended):
                os.close(descriptor)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises ``subprocess.TimeoutExpired`` as ``Popen`` does."""
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self._pidfd < 0:
            return
        # Its parent reaps it before we hear of it: its process id may be another's by then.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it still runs, and let go of its pipes."""
        self.kill()
        self.wait(STOP_S)
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_s)[0]:
            with self._looking:
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(int(os.read(self._ended, 16) or b"9"))
                    os.close(self._ended)
        return self.returncode


def finished(
    *command: str, text: str = "", env: Mapping[str, str] | None = None, imports: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a warm process to its end; ``text`` is its standard input, no more than a pipe holds."""
    with (
        tempfile.TemporaryFile() as errors,
        WarmProcess(*command, stderr=errors, env=env, imports=imports) as process,
    ):
        process.stdin.write(text)
        process.stdin.close()
        output = process.stdout.read()
        code = process.wait(FINISH_S)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, output, errors.read().decode())


class _Parent:
    """The process that forks, seen from the test process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        self._pid = os.getpid()
        with theirs:
            command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def fork(self, wanted: Wanted, descriptors: tuple[int, ...]) -> tuple[int, int]:
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(asdict(wanted)).encode()], descriptors)
            answer, found, _, _ = socket.recv_fds(self._socket, 32, 1)
        if not found:
            raise AssertionError(f"the parent of warm processes has ended: {self._process.wait(30)}")
        return int(answer), found[0]

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._socket.close()
            self._process.wait(30)


@functools.cache
def _parent() -> _Parent:
    return _Parent()


# The other side: the process that forks.


def _serve(control: socket.socket) -> Wanted | None:
    """Fork for each request; gives the request in each child, and None in the parent at its end."""
    running: dict[int, int] = {}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            _reap(running)
        if control.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, 4)
        if not message:
            return None
        wanted = Wanted(**json.loads(message))
        for name in wanted.imports:
            importlib.import_module(name)
        # What is collected never is what the parent made: its pages stay shared.
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            control.close()
            for descriptor in (reader, writer, descriptors[3], *running.values()):
                os.close(descriptor)
            _redirect(*descriptors[:3])
            return wanted
        running[pid] = descriptors[3]
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        descriptor = running.pop(pid)
        os.write(descriptor, str(status).encode())
        os.close(descriptor)


def _redirect(*descriptors: int) -> None:
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    # What the parent's streams know of their files, such as whether they can seek, does not hold for these.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    errors = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(errors, line_buffering=True, errors="backslashreplace")


def _main(descriptor: int) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    with socket.socket(fileno=descriptor) as control:
        wanted = _serve(control)
    if wanted is None:
        return
    os.environ.clear()
    os.environ.update(wanted.env)
    os.chdir(wanted.folder)
    # Where it hangs, the test that waits for it asks for this (``tests.serving.Server.stop``).
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    kind, what, *sys.argv[1:] = wanted.command
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = "-c"
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
