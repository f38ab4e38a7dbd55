"""The actor that keeps one server of a store on Ray: it starts the process, and ends when that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import ray

from arrow_tq.adapters.ray_placing import on_node
from arrow_tq.logs import logger
from arrow_tq.store.cluster.shard_note import ShardNote
from arrow_tq.store.directory import NOTE_NAME, Directory
from arrow_tq_schemas.errors import ArrowTQError, Conflict, InternalError, InvalidInput, StoreInUse

CHILD = "arrow_tq.adapters.ray_child"
START_TRIES = 10
"""A port or a directory may be held for a moment more."""
PAUSE_S = 1.0
"""Between two tries, and before a server that ended is started again."""
REFUSED_PAUSE_S = 10.0
"""Before Ray tries once more what this node refused."""
STOP_S = 30.0
SETTINGS_EXIT = 2
"""Exit code of a server whose settings do not fit: another try would not help."""
PORT_NOTE = "ray-port"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What an actor serves.

    Args:
        role: ``catalog`` or ``shard``.
        data_dir: the server's directory, with variables of the actor's node.
        memory_dir: its directory in memory, likewise; None: the server's default.
        settings: further settings of ``arrow-tq serve``, by name.
        join: URL of the catalog, for a shard.
        identity: what a shard's directory is called for life: without it the shard does not start.
        token: what servers of one store show to each other.
    """

    role: str
    data_dir: str
    memory_dir: str | None
    settings: Mapping[str, str]
    join: str | None = None
    identity: str | None = None
    token: str | None = field(default=None, repr=False)

    def of_shard(self, label: str, identity: str, join: str) -> ServerPlan:
        """From the plan of a catalog, that of a shard in a directory beside it."""
        beside = [
            None if one is None else str(Path(one).with_name(label))
            for one in (self.data_dir, self.memory_dir)
        ]
        data_dir, memory_dir = beside
        assert data_dir is not None
        return ServerPlan("shard", data_dir, memory_dir, self.settings, join, identity, self.token)


class ServerActor:
    """One server process. Where it ends unasked the actor ends too, and Ray starts both again.

    Args:
        plan: what to serve, on the node's own address.

    Raises:
        Conflict: the node does not have the shard's directory; a restarted actor is tried again.
        InvalidInput: the server's settings do not fit.
        InternalError: the server does not come up; its log is the actor's.
    """

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._address: str = ray.util.get_node_ip_address()
        self._is_restart: bool = ray.get_runtime_context().was_current_actor_reconstructed
        self._stopping = threading.Event()
        try:
            self._data_dir = on_node(plan.data_dir)
            self._check_directory()
            end_predecessor(self._data_dir)
            self._process, self._url = self._start()
        except ArrowTQError as error:
            self._give_up(error)
            raise
        if plan.role == "catalog":
            # Clients and shards know its address: the next one has to be there too.
            self._port_note.write_text(self._url.rpartition(":")[2])
        threading.Thread(target=self._watch, name="arrow-tq-watch", daemon=True).start()

    def url(self) -> str:
        """Where the server listens."""
        return self._url

    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def node(self) -> str:
        """Id of the node that it is on now."""
        return str(ray.get_runtime_context().get_node_id())

    def stop(self) -> int:
        """Stop the server in order, what it works on first; gives its exit code."""
        self._stopping.set()
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    @property
    def _port_note(self) -> Path:
        return self._data_dir.with_name(f"{self._data_dir.name}.{PORT_NOTE}")

    def _check_directory(self) -> None:
        if self._plan.identity is None:
            if self._is_restart and not (self._data_dir / NOTE_NAME).exists():
                raise Conflict(
                    f"catalog directory {str(self._data_dir)!r} is gone: an empty one is no successor"
                )
            self._data_dir.mkdir(parents=True, exist_ok=True)
            return
        note = ShardNote.read(self._data_dir)
        if note is None or note.node != self._plan.identity:
            holds = "is not there" if note is None else f"is shard {note.number} of another name"
            raise Conflict(
                f"shard directory {str(self._data_dir)!r} {holds} on {self._address}: "
                "a shard starts only with its own"
            )

    def _give_up(self, error: ArrowTQError) -> None:
        """After a restart nobody would see the error, and a disk may come back: Ray tries again."""
        if self._is_restart:
            logger("arrow_tq.ray").error("server not started", error=error.message)
            time.sleep(REFUSED_PAUSE_S)
            os._exit(1)

    def _start(self) -> tuple[subprocess.Popen[str], str]:
        last: deque[str] = deque(maxlen=1)
        for _ in range(START_TRIES):
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment(),
            )
            assert process.stdout is not None and process.stderr is not None
            log = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
            log.start()
            words = process.stdout.readline().split()
            if len(words) > 2:
                return process, words[2]
            code = process.wait()
            log.join()
            if code == SETTINGS_EXIT:
                raise InvalidInput(f"{self._plan.role}: {''.join(last).strip()}")
            time.sleep(PAUSE_S)
        raise InternalError(
            f"{self._plan.role} in {str(self._data_dir)!r} does not start (exit code {code}): "
            f"{''.join(last).strip()}"
        )

    def _command(self) -> list[str]:
        plan = self._plan
        command = [sys.executable, "-m", CHILD, "--role", plan.role]
        command += ["--data-dir", str(self._data_dir), "--host", self._address, "--http-port", "0"]
        command += ["--port", self._port_note.read_text() if self._port_note.exists() else "0"]
        if plan.memory_dir is not None:
            command += ["--memory-dir", str(on_node(plan.memory_dir))]
        if plan.join is not None:
            command += ["--join", plan.join]
        for name, value in plan.settings.items():
            command += ["--set", f"{name}={value}"]
        return command

    def _environment(self) -> dict[str, str]:
        if self._plan.token is None:
            return dict(os.environ)
        return {**os.environ, "ARROW_TQ_CLUSTER_TOKEN": self._plan.token}

    def _watch(self) -> None:
        assert self._process.stdout is not None
        # Nothing more is said there, but a full pipe would stop it.
        for _ in self._process.stdout:
            pass
        self._process.wait()
        if not self._stopping.is_set():
            time.sleep(PAUSE_S)
            os._exit(1)


def end_predecessor(data_dir: Path) -> None:
    """Kill the server of an actor that is gone: one that is stopped cannot end by itself."""
    try:
        Directory.claim(data_dir, None).release()
    except StoreInUse as error:
        pid = error.details.get("pid")
        if isinstance(pid, int) and _is_child(pid, data_dir):
            os.kill(pid, signal.SIGKILL)


def _is_child(pid: int, data_dir: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return CHILD.encode() in words and os.fsencode(data_dir) in words


def _pass_on(log: IO[str], last: deque[str]) -> None:
    """The server's log is the actor's; its last line may say why it did not start."""
    for line in log:
        last.append(line)
        sys.stderr.write(line)
