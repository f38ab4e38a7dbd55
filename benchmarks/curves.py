"""How cost grows: with chunks, segments, bytes and readers. Nothing may grow worse than linearly.

``python -m benchmarks.curves [--smoke] [--plots DIR] [--json FILE] [NAME...]``; a plot each as SVG.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import arrow_tq
from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from benchmarks import servers
from benchmarks.report import Row, show, write
from benchmarks.sizes import EXPERTS, LAYERS, TOPK, routing

CHUNK_ROWS = 64
WRITERS = 16
LINEAR = 0.7
"""Cost of one thing at the smallest size over its cost at the largest; below, it grows."""


@dataclass(slots=True)
class Curve:
    """Seconds of each kind of work at each size."""

    name: str
    unit: str
    seconds: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @contextmanager
    def timed(self, work: str, size: int) -> Iterator[None]:
        """Count what happens inside."""
        started = time.perf_counter()
        yield
        self.seconds.setdefault(work, []).append((size, time.perf_counter() - started))

    def rows(self) -> list[Row]:
        """Microseconds of one thing at the largest size, against the smallest but one."""
        found = []
        for work, points in self.seconds.items():
            # The first size pays for what every run pays once: connections, the first extent.
            first, last = points[min(1, len(points) - 1)], points[-1]
            each, base = (seconds / size * 1e6 for size, seconds in (last, first))
            name = f"{work}: one of {last[0]:,} {self.unit} to one of {first[0]:,}"
            found.append(Row(name, each, "us", base, base / each, LINEAR))
        return found


def _rows(tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(tokens).integers(0, EXPERTS, (tokens, LAYERS, TOPK), dtype=np.uint8)


def _run(store: Store) -> Run:
    return store.run(f"curve-{uuid.uuid4().hex[:8]}", fields=[fields.token_ids(), routing()])


def chunks(store: Store, sizes: Sequence[int]) -> Curve:
    """One segment of many small chunks, as a decode that hands over every 64 tokens leaves it."""
    curve = Curve("chunks", "chunks")
    rows = _rows(CHUNK_ROWS)
    for count in sizes:
        run = _run(store)
        session = run.session("s")
        with curve.timed("put", count), session.step() as step:
            step.put("token_ids", np.zeros(count * CHUNK_ROWS + 1, np.int32), start=0)
            for index in range(count):
                step.put("routed_experts", rows, start=index * CHUNK_ROWS)
        with curve.timed("finalize", count):
            session.finalize()
        batch = run.claim(1)
        with curve.timed("fetch", count):
            batch.fetch(["routed_experts"])
        with curve.timed("release", count):
            batch.release()
    return curve


def segments(store: Store, sizes: Sequence[int]) -> Curve:
    """Many short sessions, claimed as one batch."""
    curve = Curve("segments", "segments")
    tokens, experts = np.arange(17, dtype=np.int32), _rows(16)
    for count in sizes:
        run = _run(store)

        def write_one(index: int, run: Run = run) -> None:
            session = run.session(f"s-{index}")
            with session.step() as step:
                step.put("token_ids", tokens, start=0)
                step.put("routed_experts", experts, start=0)
            session.finalize(reward=float(index))

        with ThreadPoolExecutor(WRITERS) as pool, curve.timed("session, step, finalize", count):
            list(pool.map(write_one, range(count)))
        with curve.timed("claim", count):
            batch = run.claim(count)
        with curve.timed("fetch", count):
            batch.fetch(["routed_experts"])
        with curve.timed("release", count):
            batch.release()
        with curve.timed("sql", count):
            run.sql("SELECT avg(reward) FROM segments")
    return curve


def size(store: Store, sizes: Sequence[int]) -> Curve:
    """One segment, ever longer; sizes in MB."""
    curve = Curve("bytes", "MB")
    for megabytes in sizes:
        run = _run(store)
        rows = _rows(megabytes * 1_000_000 // (LAYERS * TOPK))
        session = run.session("s")
        with curve.timed("put", megabytes), session.step() as step:
            step.put("token_ids", np.zeros(len(rows) + 1, np.int32), start=0)
            step.put("routed_experts", rows, start=0)
        session.finalize()
        batch = run.claim(1)
        with curve.timed("fetch", megabytes):
            batch.fetch(["routed_experts"])
        batch.release()
    return curve


READER = """
import sys, arrow_tq
run = arrow_tq.connect(sys.argv[1]).run(sys.argv[2])
batch = run.attach(sys.argv[3], rank=0, world=1)
print("ready", flush=True)
sys.stdin.readline()
batch.fetch(["routed_experts"]).close()
print("done", flush=True)
"""


def readers(store: Store, sizes: Sequence[int]) -> Curve:
    """As many processes fetch the same 64 MB at the same moment."""
    curve = Curve("readers", "readers")
    run = _run(store)
    rows = _rows(200_000)
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.zeros(len(rows) + 1, np.int32), start=0)
        step.put("routed_experts", rows, start=0)
    session.finalize()
    ref = run.claim(1).ref
    for count in sizes:
        command = [sys.executable, "-c", READER, store.url, run.name, ref]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        for process in processes:
            assert process.stdout is not None
            if "ready" not in process.stdout.readline():
                raise RuntimeError("a reader did not start")
        with curve.timed("fetch", count):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in processes:
                assert process.stdout is not None
                if "done" not in process.stdout.readline():
                    raise RuntimeError("a reader failed")
        for process in processes:
            process.communicate()
    return curve


CURVES: dict[str, tuple[Callable[[Store, Sequence[int]], Curve], tuple[int, ...], tuple[int, ...]]] = {
    "chunks": (chunks, (500, 2_000, 8_000, 32_000), (4, 16)),
    "segments": (segments, (500, 2_000, 8_000, 32_000), (4, 16)),
    "bytes": (size, (1, 4, 16, 64, 256, 1_024), (1, 2)),
    "readers": (readers, (1, 2, 4, 8), (1, 2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CURVES)}; default all")
    parser.add_argument("--smoke", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write an SVG a curve there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in CURVES]
    if unknown:
        parser.error(f"no curve {', '.join(unknown)}: expected {', '.join(CURVES)}")
    found: list[Curve] = []
    for name in chosen.names or CURVES:
        work, sizes, small = CURVES[name]
        with servers.ours() as url, arrow_tq.connect(url) as store:
            found.append(work(store, small if chosen.smoke else sizes))
    rows = [row for curve in found for row in curve.rows()]
    show(rows)
    if chosen.json:
        write(chosen.json, rows)
    if chosen.plots:
        chosen.plots.mkdir(parents=True, exist_ok=True)
        for curve in found:
            plot(curve, chosen.plots / f"{curve.name}.svg")


def plot(curve: Curve, path: Path) -> None:
    """Seconds over size, both logarithmic, with a line of slope one to compare with."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = curve.name
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for work, points in curve.seconds.items():
        axes.loglog(*zip(*points, strict=True), marker="o", label=work)
    longest = max(curve.seconds.values(), key=lambda points: points[-1][1])
    (first, seconds), last = longest[0], longest[-1][0]
    axes.loglog([first, last], [seconds, seconds * last / first], "k:", linewidth=1, label="linear")
    axes.set(xlabel=curve.unit, ylabel="seconds", title=f"cost by {curve.name}")
    axes.legend(fontsize=8)
    axes.grid(True, which="both", alpha=0.2)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
