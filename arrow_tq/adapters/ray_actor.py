"""The actor that keeps one server of a store on Ray: it starts the process, and ends when that does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from arrow_tq_schemas.errors import InternalError

START_TRIES = 10
"""A predecessor that was killed may hold the directory for a moment."""
PAUSE_S = 1.0
"""Between two tries, and before a server that ended is started again."""
STOP_S = 30.0
PORT_NOTE = "ray-port"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What an actor serves.

    Args:
        role: ``catalog`` or ``shard``.
        data_dir: the server's directory on the actor's node.
        memory_dir: its directory in memory; None: the server's default.
        settings: further settings of ``arrow-tq serve``, by name.
        join: URL of the catalog, for a shard.
        token: what servers of one store show to each other.
    """

    role: str
    data_dir: Path
    memory_dir: Path | None
    settings: Mapping[str, str]
    join: str | None = None
    token: str | None = None


class ServerActor:
    """One server process. Where it ends unasked the actor ends too, and Ray starts both again.

    Args:
        plan: what to serve.
        address: where to listen; the node's own address.

    Raises:
        InternalError: the server does not come up; its log is the actor's.
    """

    def __init__(self, plan: ServerPlan, address: str | None = None) -> None:
        import ray

        self._plan = plan
        self._address = address or ray.util.get_node_ip_address()
        self._stopping = threading.Event()
        plan.data_dir.mkdir(parents=True, exist_ok=True)
        self._process, self._url = self._start()
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
        import ray

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
        return self._plan.data_dir.with_name(f"{self._plan.data_dir.name}.{PORT_NOTE}")

    def _start(self) -> tuple[subprocess.Popen[str], str]:
        for _ in range(START_TRIES):
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment(),
            )
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if len(words) > 2:
                return process, words[2]
            process.wait()
            time.sleep(PAUSE_S)
        raise InternalError(
            f"{self._plan.role} in {self._plan.data_dir} does not start (exit code {process.returncode}): "
            "the log of this actor says why"
        )

    def _command(self) -> list[str]:
        plan = self._plan
        command = [sys.executable, "-m", "arrow_tq.adapters.ray_child", "--role", plan.role]
        command += ["--data-dir", str(plan.data_dir), "--host", self._address, "--http-port", "0"]
        command += ["--port", self._port_note.read_text() if self._port_note.exists() else "0"]
        if plan.memory_dir is not None:
            command += ["--memory-dir", str(plan.memory_dir)]
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
