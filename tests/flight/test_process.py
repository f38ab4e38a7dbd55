"""The server as a process: starting, stopping, and saying no."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pyarrow.flight as flight
import pytest

import arrow_tq
from arrow_tq import Field, errors
from arrow_tq.client import ClientOptions
from arrow_tq_schemas.spans import Span, to_spans
from tests.flight import wire
from tests.flight.test_gets import committed
from tests.serving import Server
from tests.warm import finished


def serve_fails(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and standard error of a server that must not start."""
    done = finished("-m", "arrow_tq_server", *arguments, env={**os.environ, **environment})
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def said(stderr: str) -> str:
    """The one line that is no log line."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("arrow-tq serve:")]
    return line


@contextmanager
def few_open_files(limit: int) -> Iterator[int]:
    """Processes that are started meanwhile begin with this soft limit; gives the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_says_where_it_serves_and_leaves_no_note(tmp_path: Path) -> None:
    folders = (tmp_path / "data", tmp_path / "memory")
    with few_open_files(512) as hard, Server(*folders, start="cold") as server:
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        note = json.loads((tmp_path / "data" / "server.json").read_text())
        assert note == {"url": server.url, "http_url": server.http_url, "pid": server.pid}
        assert httpx.get(f"{server.http_url}/livez").text == "ok\n"
        assert httpx.get(f"{server.http_url}/readyz").status_code == 200
        assert server.stop() == 0
    assert not (tmp_path / "data" / "server.json").exists()
    log = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert log[-1]["event"] == "stopped" and log[-1]["exit_code"] == 0
    assert {"limit": hard, "before": 512}.items() <= log[0].items()


def test_a_signal_that_another_thread_takes_stops_it_too(tmp_path: Path) -> None:
    """The kernel gives a process's signal to whichever thread it likes, where the main one is busy."""
    with Server(tmp_path / "data", tmp_path / "memory") as server:
        threads = Path(f"/proc/{server.pid}/task").iterdir()
        taking = [int(one.name) for one in threads if not blocks(one, signal.SIGTERM)]
        other = next(one for one in taking if one != server.pid)
        assert ctypes.CDLL(None).tgkill(server.pid, other, signal.SIGTERM) == 0
        assert server.process.wait(20) == 0


def blocks(thread: Path, number: int) -> bool:
    (mask,) = re.findall(r"SigBlk:\s*(\w+)", (thread / "status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_second_server_names_the_first(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    folders = ["--data-dir", str(server.data_dir), "--memory-dir", str(tmp_path)]
    for ports in (["--port", "0", "--http-port", "0"], ["--port", port, "--http-port", "0"]):
        code, stderr = serve_fails(*folders, *ports)
        assert code == 1
        assert f"store-in-use: store {str(server.data_dir)!r} is in use by process {server.pid}" in said(
            stderr
        )
        assert server.url in said(stderr)
    with pytest.raises(errors.StoreInUse, match=server.url):
        arrow_tq.open(server.data_dir)


def test_a_taken_port_is_named(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    common = ["--data-dir", str(tmp_path / "d"), "--memory-dir", str(tmp_path / "m")]
    code, stderr = serve_fails(*common, "--port", port, "--http-port", "0")
    assert code == 1
    assert f"unavailable: port {port} on '127.0.0.1': Address already in use" in said(stderr)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        http_port = str(taken.getsockname()[1])
        _, stderr = serve_fails(*common, "--port", "0", "--http-port", http_port)
    assert f"http_port {http_port}" in said(stderr)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "shard"], "invalid-input: setting join"),
        (["--join", "grpc://head:1"], "invalid-input: setting join"),
        (["--role", "boss"], "invalid-input: setting role"),
        (["--set", "gets_max=none"], "invalid-input: setting gets_max"),
        (["--set", "no_such=1"], "invalid-input: setting no_such"),
        (["--set", "gets_max"], "invalid-input: --set 'gets_max': expected NAME=VALUE"),
        (["--config", "/no/such.toml"], "invalid-input: config file '/no/such.toml'"),
        (["--port", "70000"], "invalid-input: setting port"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    code, stderr = serve_fails("--data-dir", str(tmp_path / "d"), *arguments)
    assert code == 2
    assert words in said(stderr)
    assert not (tmp_path / "d").exists()


def test_data_dir_is_required() -> None:
    code, stderr = serve_fails()
    assert code == 2 and "setting data_dir: Field required" in said(stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_though_a_reader_hangs_and_streams_are_open(tmp_path: Path, number: signal.Signals) -> None:
    """A reader that takes one message and no more, an idle put stream, a waiting claim."""
    field = Field("experts", "uint8", shape=(40, 8))
    with Server(tmp_path / "data", tmp_path / "memory", "--set", "drain_s=1.5") as server:
        store = arrow_tq.connect(server.url)
        run = store.run("r", fields=[field])
        chunks = [
            wire.make_chunk(
                field, "r", np.zeros((100_000, 40, 8), np.uint8), start=i * 100_000, epoch=run.epoch
            )
            for i in range(4)
        ]
        committed(run, field, chunks)
        spans = to_spans([Span(0, one.header.chunk_id, 0, one.header.rows) for one in chunks])
        with flight.connect(server.url) as client:
            ticket = wire.span_ticket(field, "r", spans)
            hanging = client.do_get(flight.Ticket(ticket.model_dump_json().encode()), wire.CALL)
            hanging.read_chunk()
            outcome: list[BaseException] = []
            claimer = threading.Thread(target=wait_for_claim, args=(run, outcome))
            claimer.start()
            time.sleep(0.3)
            began = time.monotonic()
            server.process.send_signal(number)
            assert server.process.wait(20) == 0
            assert time.monotonic() - began < 10
            hanging.cancel()
            claimer.join(20)
            assert isinstance(outcome[0], errors.Unavailable)
        store.close()


def test_a_waiting_claim_does_not_delay_a_stop(tmp_path: Path) -> None:
    slow = ("--set", "drain_s=15")
    with (
        Server(tmp_path / "data", tmp_path / "memory", *slow) as server,
        arrow_tq.connect(server.url) as store,
    ):
        run = store.run("r", fields=[Field("x", "int64")])
        outcome: list[BaseException] = []
        claimer = threading.Thread(target=wait_for_claim, args=(run, outcome))
        claimer.start()
        time.sleep(0.3)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 8
        claimer.join(20)
        assert isinstance(outcome[0], errors.Unavailable | errors.Conflict)


def wait_for_claim(run: arrow_tq.runs.Run, outcome: list[BaseException]) -> None:
    try:
        run.claim(1, wait_s=60)
    except BaseException as error:
        outcome.append(error)


def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    """Killed, not stopped; read through a new server on the same directories."""
    field = Field("x", "int64")
    values = np.arange(1000, dtype=np.int64)
    with Server(tmp_path / "data", tmp_path / "memory") as server, arrow_tq.connect(server.url) as store:
        run = store.run("r", fields=[field])
        with run.session("s").step() as step:
            step.put("x", values, start=0)
        server.kill()
    with Server(tmp_path / "data", tmp_path / "memory") as server, arrow_tq.connect(server.url) as store:
        store.run("r").session("s").finalize()
        with flight.connect(server.url) as client:
            (batch,) = wire.get(client, wire.segment_ticket(field, "r", ["s~0"]))
        assert np.array_equal(batch["x"].to_numpy(), values)
        assert server.stop() == 0


def test_metrics_tell_what_happened(tmp_path: Path) -> None:
    # Over the wire: what goes around it is in the store's own figures.
    wired = ClientOptions(same_host=False)
    with (
        Server(tmp_path / "data", tmp_path / "memory") as server,
        arrow_tq.connect(server.url, options=wired) as store,
    ):
        run = store.run("r", fields=[Field("x", "int64")])
        with run.session("s").step() as step:
            step.put("x", np.arange(1000, dtype=np.int64), start=0)
        run.session("s").finalize()
        run.session("gone").abort()
        with pytest.raises(errors.SessionClosed):
            run.session("gone")
        with flight.connect(server.url) as client:
            wire.get(client, wire.segment_ticket(run.fields["x"], "r", ["s~0"]))
        seen = samples(server)
        assert seen["arrow_tq_put_bytes_total"] == 8000
        assert seen["arrow_tq_put_seconds_count"] == 1
        assert seen["arrow_tq_get_seconds_count"] == 1
        assert seen["arrow_tq_commit_seconds_count"] == 1
        assert seen['arrow_tq_bytes{run="r",tier="memory"}'] >= 8000
        assert seen['arrow_tq_errors_total{code="session-closed"}'] == 1
        assert seen["arrow_tq_in_flight_bytes"] == 0
        assert seen['arrow_tq_handlers{budget="put_streams_max"}'] >= 1
        assert seen["arrow_tq_oldest_unclaimed_s"] >= 0
        for name in ("capacity_bytes", "open_sessions", "commits_total", "corrupt_chunks_total", "chunks"):
            assert f"arrow_tq_{name}" in seen
        assert server.stop() == 0


def test_the_first_claim_imports_nothing_more() -> None:
    """A lease runs from the claim's start: what is slow once must have happened before."""
    code = (
        "import sys\n"
        "import pyarrow as pa\n"
        "from arrow_tq.store.where import compile_order_by\n"
        "from arrow_tq_server.process import warm_up\n"
        "warm_up()\n"
        "before = set(sys.modules)\n"
        "pa.array([1, 2]), pa.array(['a'], pa.string())\n"
        "try: compile_order_by('x DESC', {})\n"
        "except Exception as error: assert type(error).__name__ == 'InvalidQuery', error\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"


def samples(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.http_url}/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line and line[0] != "#")
    }
