"""The worker dies, its parent dies, or a fork uses it: typed errors, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from arrow_tq.sql import SqlLimits, SqlService
from arrow_tq.testing.metadata import MemoryMetadata
from arrow_tq_schemas.errors import ArrowTQError, Busy, Conflict, QueryKilled

SLOW = "SELECT count(*) FROM range(1000000000000) WHERE range % 7 = 3"
LIMITS = SqlLimits(timeout_s=30, wait_s=0.3, waiting_max=2, close_s=0.5)


@pytest.fixture
def service() -> Iterator[SqlService]:
    source = MemoryMetadata()
    source.put("segments", 1, run="a", segment_id="s")
    service = SqlService(source, LIMITS)
    yield service
    service.close()


def workers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "arrow_tq.sql_worker" in " ".join(child.cmdline())]


def wait_for(condition: object, timeout_s: float = 10) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Asking(threading.Thread):
    """A query in a thread, and the error that it ended with."""

    def __init__(self, service: SqlService, query: str) -> None:
        super().__init__()
        self.service, self.text = service, query
        self.error: ArrowTQError | None = None

    def run(self) -> None:
        try:
            self.service.query(self.text, "a")
        except ArrowTQError as error:
            self.error = error


def asked(service: SqlService) -> Asking:
    """A slow query that has begun."""
    service.query("SELECT 1", "a")
    (worker,) = workers_of(os.getpid())
    before = worker.cpu_times().user
    asking = Asking(service, SLOW)
    asking.start()
    wait_for(lambda: worker.cpu_times().user > before + 0.05)
    return asking


def test_a_worker_killed_in_mid_query(service: SqlService) -> None:
    asking = asked(service)
    (worker,) = workers_of(os.getpid())
    worker.send_signal(signal.SIGKILL)
    asking.join(10)
    assert isinstance(asking.error, QueryKilled)
    assert "the worker died (SIGKILL) while running the query" in str(asking.error)
    assert service.query("SELECT segment_id AS s FROM segments", "a").to_pylist() == [{"s": "s"}]
    assert [one.pid for one in workers_of(os.getpid())] != [worker.pid]


def test_a_worker_killed_between_queries(service: SqlService) -> None:
    service.query("SELECT 1", "a")
    (worker,) = workers_of(os.getpid())
    worker.kill()
    worker.wait(5)
    assert service.query("SELECT count(*) AS n FROM segments", "a").to_pylist() == [{"n": 1}]


def test_waiting_is_bounded(service: SqlService) -> None:
    asking = asked(service)
    start = time.monotonic()
    with pytest.raises(Busy, match=r"waited 0.3 s \(wait_s\)"):
        service.query("SELECT 1", "a")
    assert time.monotonic() - start < 5
    waiting = Asking(service, "SELECT 1")
    waiting.start()
    wait_for(lambda: service._waiting._value == 0)
    with pytest.raises(Busy, match=r"2 queries wait already \(waiting_max\)"):
        service.query("SELECT 1", "a")
    service.close()
    asking.join(10)
    waiting.join(10)
    assert isinstance(asking.error, QueryKilled)


def test_close_ends_the_worker(service: SqlService) -> None:
    asking = asked(service)
    start = time.monotonic()
    service.close()
    asking.join(10)
    assert time.monotonic() - start < 5
    assert isinstance(asking.error, QueryKilled)
    assert not workers_of(os.getpid())


def test_a_fork_is_refused_and_leaves_the_worker_alone(service: SqlService) -> None:
    service.query("SELECT 1", "a")
    child = os.fork()
    if not child:
        code = 1
        try:
            service.query("SELECT 1", "a")
        except Conflict:
            service.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert service.query("SELECT 1 AS x", "a").to_pylist() == [{"x": 1}]


PARENT = f"""
import sys, threading, time
from arrow_tq.sql import SqlLimits, SqlService
from arrow_tq.testing.metadata import MemoryMetadata
service = SqlService(MemoryMetadata(), SqlLimits())
service.query("SELECT 1", None)
threading.Thread(target=service.query, args=({SLOW!r}, None), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def test_the_worker_ends_with_its_parent_in_mid_query() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        (worker,) = workers_of(parent.pid)
        time.sleep(0.2)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 5)


def test_starting_costs_nothing_before_the_first_query() -> None:
    code = (
        "import sys, arrow_tq, arrow_tq.sql; from arrow_tq.testing.metadata import MemoryMetadata;"
        "arrow_tq.sql.SqlService(MemoryMetadata(), arrow_tq.sql.SqlLimits());"
        "print(sorted({'duckdb', 'sqlglot', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"


def test_workers_leave_nothing_behind(service: SqlService) -> None:
    own = psutil.Process()

    def kill_one() -> None:
        with pytest.raises(QueryKilled):
            service.query("SELECT len(repeat('x', 4000000000))", "a")
        assert service.query("SELECT 1 AS x", "a").num_rows == 1

    kill_one()
    files, threads = own.num_fds(), threading.active_count()
    for _ in range(2):
        kill_one()
    wait_for(lambda: own.num_fds() <= files and threading.active_count() <= threads)
    assert len(workers_of(own.pid)) == 1
