"""What the actor of a store on Ray does about the server of an actor before it, without a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arrow_tq.store.directory import Directory
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas.errors import StoreInUse

pytest.importorskip("ray", reason="needs the extra ray")

from arrow_tq.adapters.ray_actor import CHILD, end_predecessor


@contextmanager
def serving(module: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server whose standard input is open, as under an actor."""
    folders = ["--data-dir", str(folder / "data"), "--memory-dir", str(folder / "memory")]
    command = [
        sys.executable,
        "-m",
        module,
        *folders,
        "--port",
        "0",
        "--http-port",
        "0",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline().startswith("arrow-tq serving ")
        yield process
    finally:
        process.kill()
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    with serving(CHILD, tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == -signal.SIGKILL


def test_one_that_is_stopped_does_not_and_is_ended(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with serving(CHILD, tmp_path) as process:
        assert process.stdin is not None
        os.kill(process.pid, signal.SIGSTOP)
        process.stdin.close()
        with pytest.raises(StoreInUse):
            Directory.claim(data_dir, None)
        end_predecessor(data_dir)
        assert process.wait(30) == -signal.SIGKILL
        Directory.claim(data_dir, None).release()


def test_a_server_that_somebody_else_started_is_left_alone(tmp_path: Path) -> None:
    with serving("arrow_tq_server", tmp_path) as process:
        end_predecessor(tmp_path / "data")
        with pytest.raises(AssertionError):
            wait_until(lambda: process.poll() is not None, 1.0)
        with pytest.raises(StoreInUse):
            Directory.claim(tmp_path / "data", None)


def test_an_actor_of_another_directory_is_no_predecessor(tmp_path: Path) -> None:
    """The lock's note outlives its process, and the number may be that of another."""
    with serving(CHILD, tmp_path / "a") as process:
        held = Directory.claim(tmp_path / "b", None)
        os.pwrite(held.descriptor, f'{{"pid": {process.pid}, "url": null}}'.encode().ljust(80), 0)
        end_predecessor(tmp_path / "b")
        with pytest.raises(AssertionError):
            wait_until(lambda: process.poll() is not None, 1.0)
        held.release()
