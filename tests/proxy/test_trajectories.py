"""Recorded trajectories of real agents, replayed through the proxy by many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.interface import Store
from tests.proxy import processes
from tests.proxy.conftest import RUN, SIZES
from tests.proxy.processes import Process
from tests.proxy.replay import Rollout, Tally, Upset, check, needs_trajectories, play, trajectories
from tests.proxy.upstream_engine import Sizes
from tests.serving import Server, quiet_ports

LARGE = Sizes(layers=32, topk=8, experts=64)
PSS_MAX = 300 << 20
SMALL_MEMORY = [
    "inflight_bytes_max=50331648",
    "response_bytes_max=33554432",
    "put_inflight_bytes_max=33554432",
]


class Watch:
    """The largest proportional set size of a process, sampled while it runs."""

    def __init__(self, pid: int) -> None:
        self.most_bytes = 0
        self._file = Path(f"/proc/{pid}/smaps_rollup")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            try:
                lines = self._file.read_text().splitlines()
            except OSError:
                return
            pss = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            self.most_bytes = max(self.most_bytes, pss)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def scene(
    folder: Path, sizes: Sizes, *server_settings: str, engine_flags: tuple[str, ...] = ()
) -> Iterator[tuple[Server, Process, Store]]:
    """A store with a run for this routing, and an engine's double that makes it."""
    with (
        Server(folder / "data", folder / "memory", *server_settings) as server,
        arrow_tq.connect(server.url) as store,
    ):
        routing = fields.routed_experts(layers=sizes.layers, topk=sizes.topk, num_experts=sizes.experts)
        store.run(RUN, fields=[fields.token_ids(), fields.logprobs(), routing])
        shape = [f"--{name}={getattr(sizes, name)}" for name in ("layers", "topk", "experts")]
        recorder = ["--store", server.url, "--run", RUN]
        with processes.upstream(folder / "upstream.log", *shape, *recorder, *engine_flags) as upstream:
            yield server, upstream, store


def metric(proxy_url: str, name: str) -> float:
    text = httpx.get(f"{proxy_url}/arrow-tq/metrics").text
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"arrow_tq_proxy_{name}")
    )


@needs_trajectories
@pytest.mark.parametrize("routing", ["payload", pytest.param("receipts", marks=pytest.mark.slow)])
def test_many_agents_at_once(tmp_path: Path, routing: str) -> None:
    base = "/sglang" if routing == "payload" else "/recorded"
    tally = Tally()
    rollouts = [Rollout(n, line, Upset(), 4, tally) for n, line in enumerate(trajectories(24))]
    with scene(tmp_path, SIZES) as (server, upstream, store):
        log = tmp_path / "proxy.log"
        with processes.proxy(log, upstream.url + base, server.url, RUN, "--routing", routing) as proxy:
            processes.wait_until_ready(proxy.url)
            asyncio.run(play(proxy.url, rollouts, at_once=24))
            assert metric(proxy.url, "calls_under_way") == metric(proxy.url, "inflight_bytes") == 0
            assert proxy.stop() == 0
        assert "handler failed" not in log.read_text()
        seen = check(store.run(RUN), rollouts, SIZES)
    counts = tally.counts
    assert seen["segments"] >= counts["finalized"] > 15
    assert min(counts[name] for name in ("branches", "compactions", "repeated calls", "lost answers")) > 0


@pytest.mark.slow
@needs_trajectories
@pytest.mark.parametrize("routing", ["payload", "receipts"])
@pytest.mark.timeout(1800)
def test_the_whole_set_in_bounded_memory(tmp_path: Path, routing: str) -> None:
    """200 trajectories, 64 at a time, gigabytes of routing: the proxy stays small, every value is right."""
    tally = Tally()
    rollouts = [Rollout(n, line, Upset(), 1000, tally) for n, line in enumerate(trajectories(200))]
    base = "/sglang" if routing == "payload" else "/recorded"
    with scene(tmp_path, LARGE, engine_flags=("--incremental",)) as (server, upstream, store):
        settings = [word for one in SMALL_MEMORY for word in ("--set", one)]
        log = tmp_path / "proxy.log"
        with processes.proxy(
            log, upstream.url + base, server.url, RUN, "--routing", routing, *settings
        ) as proxy:
            httpx.get(f"{proxy.url}/arrow-tq/readyz", timeout=30)
            began = time.monotonic()
            with Watch(proxy.pid) as watch:
                asyncio.run(play(proxy.url, rollouts, at_once=64))
            took = time.monotonic() - began
            passed, stored = metric(proxy.url, "engine_bytes_total"), metric(proxy.url, "stored_bytes_total")
            assert proxy.stop() == 0
        seen = check(store.run(RUN), rollouts, LARGE)
    print(
        f"\n{routing}: {dict(tally.counts)} in {took:.0f} s; engine -> proxy {passed / 1e9:.2f} GB, stored "
        f"{stored / 1e9:.2f} GB, proxy -> agents {tally.received_bytes / 1e6:.1f} MB; proxy at most "
        f"{watch.most_bytes / (1 << 20):.0f} MiB PSS; compared {seen}"
    )
    assert "handler failed" not in log.read_text()
    assert watch.most_bytes < PSS_MAX
    if routing == "payload":
        assert passed > 2e9
    else:
        # Token ids and log-probs alone came from the engine.
        assert passed < 0.25 * stored


@pytest.mark.slow
@needs_trajectories
@pytest.mark.timeout(1800)
def test_no_acked_step_is_lost_when_anything_is_killed(tmp_path: Path) -> None:
    """The proxy and the server are killed at random, agents give up at random: they ask again, and go on."""
    tally = Tally()
    upset = Upset(lost=0.15)
    rollouts = [Rollout(n, line, upset, 8, tally) for n, line in enumerate(trajectories(200))]
    rng = np.random.default_rng(5)
    orphan_ttl = ["--set", "orphan_ttl_s=5"]
    kills = {"proxy": 0, "server": 0}
    ports = quiet_ports(2)
    fixed = [*orphan_ttl, "--port", str(ports[0])]
    with scene(tmp_path, SIZES, *fixed) as (server, upstream, _), contextlib.ExitStack() as ends:
        running: dict[str, Server | Process] = {"server": server}
        log = tmp_path / "proxy.log"
        quick = ["--set", "store_s=5", "--set", "connect_s=2"]

        def new_proxy() -> Process:
            return processes.proxy(log, f"{upstream.url}/sglang", server.url, RUN, *quick, port=ports[1])

        running["proxy"] = first = new_proxy()
        over, kills_at = threading.Event(), [40]

        def killer() -> None:
            while not over.wait(0.05):
                # Counted in calls, not in seconds: a slow machine must get somewhere too.
                if tally.counts["calls"] < kills_at[0]:
                    continue
                kills_at[0] += int(rng.integers(60, 160))
                victim = "proxy" if rng.random() < 0.6 else "server"
                running[victim].kill()
                kills[victim] += 1
                if victim == "proxy":
                    running["proxy"] = new_proxy()
                else:
                    running["server"] = Server(server.data_dir, server.memory_dir, *fixed)
                processes.wait_until_ready(first.url)

        ends.callback(lambda: [one.__exit__(None, None, None) for one in running.values()])
        thread = threading.Thread(target=killer)
        thread.start()
        try:
            asyncio.run(play(first.url, rollouts, at_once=64))
        finally:
            over.set()
            thread.join()
        last = running["server"]
        with arrow_tq.connect(server.url) as store:
            kept = "SELECT count(*) AS n FROM chunks WHERE state <> 'released'"
            until = time.monotonic() + 60
            while True:
                (row,) = store.sql(kept, run=RUN).to_pylist()
                held = store.stats()["chunks"]
                if held == row["n"] or time.monotonic() > until:
                    break
                time.sleep(0.5)
            assert held == row["n"], "chunks that no step has outlived their time"
            seen = check(store.run(RUN), rollouts, SIZES)
        assert running["proxy"].stop() == 0
        assert last.stop() == 0
    print(f"\nkilled {kills}; {dict(tally.counts)}; compared {seen}")
    assert min(kills.values()) > 2
