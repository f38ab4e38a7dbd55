"""How cost grows: with chunks, segments, bytes and readers. Nothing may grow worse than linearly.

``python -m benchmarks.curves [--smoke] [--plots DIR] [--json FILE [--add]] [NAME...]``; a plot each as SVG.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
import numpy.typing as npt

import arrow_tq
from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from benchmarks import plots, servers
from benchmarks.report import Row, ceiling, joined, machine, read, show, stop_cleanly, write
from benchmarks.sizes import EXPERTS, FULL, LAYERS, SMOKE, TOPK, routing

CHUNK_ROWS = 64
WRITERS = 16
EXPONENT = 1.1
"""Cost may grow as size to this power: linear, and what a measurement is off by."""
ROUNDS, BUDGET_S = 5, 4.0
"""A size is measured so often, or until it took so long."""


@dataclass(slots=True)
class Curve:
    """Seconds of each kind of work at each size, one figure a round."""

    name: str
    unit: str
    rounds: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    @contextmanager
    def timed(self, work: str, size: int) -> Iterator[None]:
        """Count what happens inside."""
        started = time.perf_counter()
        yield
        self.rounds.setdefault(work, {}).setdefault(size, []).append(time.perf_counter() - started)

    @property
    def seconds(self) -> dict[str, list[tuple[int, float]]]:
        """Medians over the rounds."""
        return {
            work: [(size, statistics.median(times)) for size, times in sizes.items()]
            for work, sizes in self.rounds.items()
        }

    def rows(self) -> list[Row]:
        """Each kind of work's exponent, not to pass ``EXPONENT``, and what one thing costs at the end."""
        found = []
        for work, points in self.seconds.items():
            name = f"{self.name}: {work}"
            found.append(ceiling(f"{name}, exponent", max(exponent(points), 0.01), "power", EXPONENT))
            size, seconds = points[-1]
            each = f"{name}, one of {size:,} {self.unit}"
            found.append(Row(each, seconds / size * 1e6, "us", None, None, None))
        return found


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The power of size that seconds grow with: a straight line through logarithms, least squares.

    Fixed costs flatten it at small sizes, so only the larger half of the sizes counts, at least three.
    """
    chosen = points[min(len(points) // 2, max(len(points) - 3, 0)) :]
    size, seconds = np.log([[float(one), other] for one, other in chosen]).T
    return float(np.polyfit(size, seconds, 1)[0]) if len(chosen) > 1 else 1.0


def _rows(tokens: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(tokens).integers(0, EXPERTS, (tokens, LAYERS, TOPK), dtype=np.uint8)


def _run(store: Store) -> Run:
    return store.run(f"curve-{uuid.uuid4().hex[:8]}", fields=[fields.token_ids(), routing()])


def chunks(store: Store, curve: Curve, count: int) -> None:
    """One segment of many small chunks, as a decode that hands over every 64 tokens leaves it."""
    rows = _rows(CHUNK_ROWS)
    out = np.ones((count * CHUNK_ROWS + 1, LAYERS, TOPK), np.uint8)
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
        batch.fetch("routed_experts", out={"routed_experts": out})
    with curve.timed("release", count):
        batch.release()


def segments(store: Store, curve: Curve, count: int) -> None:
    """Many short sessions, claimed as one batch."""
    tokens, experts = np.arange(17, dtype=np.int32), _rows(16)
    run = _run(store)

    def write_one(index: int) -> None:
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


def size(store: Store, curve: Curve, megabytes: int) -> None:
    """One segment, ever longer; read into memory that is there already."""
    run = _run(store)
    rows = _rows(megabytes * 1_000_000 // (LAYERS * TOPK))
    out = np.ones((len(rows) + 1, LAYERS, TOPK), np.uint8)
    session = run.session("s")
    with curve.timed("put", megabytes), session.step() as step:
        step.put("token_ids", np.zeros(len(rows) + 1, np.int32), start=0)
        step.put("routed_experts", rows, start=0)
    session.finalize()
    batch = run.claim(1)
    for work in ("fetch, first", "fetch, again"):
        with curve.timed(work, megabytes):
            batch.fetch("routed_experts", out={"routed_experts": out})
    batch.release()


READER = f"""
import sys, numpy, arrow_tq
run = arrow_tq.connect(sys.argv[1]).run(sys.argv[2])
world, tokens, rank = map(int, sys.argv[4:])
batch = run.attach(sys.argv[3], rank=rank, world=world)
out = numpy.ones((tokens, {LAYERS}, {TOPK}), numpy.uint8)
print("ready", flush=True)
sys.stdin.readline()
batch.fetch("routed_experts", out={{"routed_experts": out}})
print("done", flush=True)
batch.release()
"""
READER_TOKENS = 200_000


def readers(store: Store, curve: Curve, count: int) -> None:
    """As many processes fetch the same 64 MB at the same moment."""
    run = _run(store)
    rows = _rows(READER_TOKENS)
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.zeros(len(rows) + 1, np.int32), start=0)
        step.put("routed_experts", rows, start=0)
    session.finalize()
    ref = run.claim(1).ref
    command = [sys.executable, "-c", READER, store.url, run.name, ref, str(count), str(len(rows) + 1)]
    processes: list[subprocess.Popen[str]] = []
    try:
        # One after the other: many that start at once on a busy machine wait too long for their connection.
        for rank in range(count):
            started = subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(started)
            _await([started], "ready")
        with curve.timed("fetch", count):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            _await(processes, "done")
    finally:
        for process in processes:
            process.communicate()


def _await(processes: Sequence[subprocess.Popen[str]], word: str) -> None:
    for process in processes:
        assert process.stdout is not None
        if word not in process.stdout.readline():
            raise RuntimeError(f"a reader is not {word}")


@dataclass(frozen=True, slots=True)
class Kind:
    """Work at one size, and the sizes that it is done at."""

    unit: str
    work: Callable[[Store, Curve, int], None]
    sizes: tuple[int, ...]
    small: tuple[int, ...]

    def measured(self, name: str, sizes: Sequence[int], rounds: int) -> Curve:
        """All sizes, after a round at the smallest that pays for what every run pays once."""
        curve = Curve(name, self.unit)
        with servers.ours() as url, arrow_tq.connect(url) as store:
            self.work(store, Curve("warming up", self.unit), sizes[0])
            for size in sizes:
                began = time.perf_counter()
                for _ in range(rounds):
                    self.work(store, curve, size)
                    if time.perf_counter() - began > BUDGET_S:
                        break
        return curve


CURVES = {
    "chunks": Kind("chunks", chunks, (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000), (4, 16)),
    "segments": Kind("segments", segments, (250, 500, 1_000, 2_000, 4_000, 8_000), (4, 16)),
    "bytes": Kind("MB", size, (16, 32, 64, 128, 256, 512, 1_024), (1, 2)),
    "readers": Kind("readers", readers, (1, 2, 4, 8), (1, 2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CURVES)}; default all")
    parser.add_argument("--smoke", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write an SVG a curve there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--add", action="store_true", help="keep what FILE has and is not measured now")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in CURVES]
    if unknown:
        parser.error(f"no curve {', '.join(unknown)}: expected {', '.join(CURVES)}")
    stop_cleanly()
    sizes = SMOKE if chosen.smoke else FULL
    about = machine(sizes.touch_bytes, sizes.touch_away_s)
    rows: list[Row] = []
    curves: dict[str, object] = {}
    if chosen.add and chosen.json and chosen.json.exists():
        rows, curves = read(chosen.json), json.loads(chosen.json.read_text())["curves"]
    for name in chosen.names or CURVES:
        kind = CURVES[name]
        taken = (kind.small, 1) if chosen.smoke else (kind.sizes, ROUNDS)
        curve = kind.measured(name, *taken)
        show(curve.rows(), about)
        rows = joined(rows, curve.rows())
        curves[name] = {"unit": curve.unit, "seconds": curve.seconds}
        if chosen.json:
            # After each curve: a run that is cut short has not been for nothing.
            write(chosen.json, rows, about, curves={one: curves[one] for one in CURVES if one in curves})
        if chosen.plots:
            plots.curve(curve.name, curve.unit, curve.seconds, chosen.plots / f"{curve.name}.svg")


if __name__ == "__main__":
    main()
