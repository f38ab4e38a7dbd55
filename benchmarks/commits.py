"""Step commits per second, in process and over the wire, from many clients at once."""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import arrow_tq
from arrow_tq import fields
from arrow_tq.interface import Store
from benchmarks import servers
from benchmarks.report import Row, ceiling, floor
from benchmarks.sizes import Sizes

ENGINE_TARGET, WIRE_TARGET = 10_000.0, 5_000.0
"""Commits a second that the design asks for; the baseline of these rows is the target itself."""


def rows(sizes: Sizes) -> list[Row]:
    """Commits without payload: what the control path costs."""
    with tempfile.TemporaryDirectory() as folder, arrow_tq.open(folder) as store:
        engine, engine_p99 = _rate(store, sizes)
    with servers.ours() as url, arrow_tq.connect(url) as store:
        wire, wire_p99 = _rate(store, sizes)
    return [
        floor("step commits, engine", engine, "1/s", ENGINE_TARGET),
        ceiling("step commits, engine, p99", engine_p99, "ms", 10.0),
        floor("step commits, over the wire", wire, "1/s", WIRE_TARGET),
        ceiling("step commits, over the wire, p99", wire_p99, "ms", 30.0),
    ]


def _rate(store: Store, sizes: Sizes) -> tuple[float, float]:
    """Commits a second over all clients, and the 99th percentile of one commit in ms."""
    run = store.run("commits", fields=[fields.token_ids()], durability="disk")
    sessions = [run.session(f"s-{index}") for index in range(sizes.clients)]

    begin = threading.Barrier(sizes.clients + 1)

    def client(index: int) -> list[float]:
        times = []
        # What is measured are clients at work: neither their threads' start nor a session's first step.
        sessions[index].step(version="1").commit()
        begin.wait()
        for _ in range(sizes.commits):
            started = time.perf_counter()
            sessions[index].step(version="1").commit()
            times.append(time.perf_counter() - started)
        return times

    with ThreadPoolExecutor(sizes.clients) as pool:
        parts = [pool.submit(client, index) for index in range(sizes.clients)]
        begin.wait()
        started = time.perf_counter()
        times = [value for part in parts for value in part.result()]
    elapsed = time.perf_counter() - started
    return len(times) / elapsed, float(np.percentile(times, 99) * 1e3)
