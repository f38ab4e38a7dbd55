"""Rows, medians of interleaved rounds, and how they are printed."""

from __future__ import annotations

import functools
import json
import mmap
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. ``ratio`` is ours to the baseline: larger is better."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    target: float | None


def interleaved(rounds: int, work: Sequence[Callable[[], float]], pause_s: float = 0.0) -> list[float]:
    """The median of each function's figure over ``rounds`` rounds in which all take turns.

    Each turn begins after the same pause, so that none has a warmer processor than the others.
    """
    figures: list[list[float]] = [[] for _ in work]
    for _ in range(rounds):
        for index, function in enumerate(work):
            time.sleep(pause_s)
            figures[index].append(function())
    return [statistics.median(values) for values in figures]


def rate(count: float, function: Callable[[], object]) -> float:
    """``count`` per second of one call."""
    started = time.perf_counter()
    function()
    return count / (time.perf_counter() - started)


def against(name: str, ours: float, baseline: float, unit: str, target: float | None) -> Row:
    return Row(name, ours, unit, baseline, ours / baseline, target)


def floor(name: str, value: float, unit: str, bound: float) -> Row:
    """A row whose figure should reach ``bound``."""
    return Row(name, value, unit, bound, value / bound, 1.0)


def ceiling(name: str, value: float, unit: str, bound: float) -> Row:
    """A row whose figure should stay below ``bound``."""
    return Row(name, value, unit, bound, bound / value, 1.0)


def met(row: Row) -> bool:
    """Whether the row reaches its target; a row without one does."""
    return row.target is None or (row.ratio is not None and row.ratio >= row.target)


def stop_cleanly() -> None:
    """Told to stop, the program still stops the servers that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


PAGE_BYTES = 4096


@functools.cache
def machine(touch_bytes: int, away_s: float) -> dict[str, object]:
    """What the figures were measured on, and what a page of its memory costs at the first touch.

    ``fresh``: of memory that was freed for some seconds; ``recycled``: of memory freed a moment ago. Where
    the host of a virtual machine takes freed pages back, the two differ a hundredfold, and what allocates
    pays the first. ``load_before``: of the last minute; what else ran.

    Args:
        touch_bytes: how much is touched.
        away_s: how long it rests, freed, before that.
    """
    load = os.getloadavg()[0]
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    _touch_us(touch_bytes)
    time.sleep(away_s)
    fresh, recycled = _touch_us(touch_bytes), _touch_us(touch_bytes)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(load, 1),
        "first_touch_fresh_us_a_page": round(fresh, 2),
        "first_touch_recycled_us_a_page": round(recycled, 2),
    }


def _touch_us(size: int) -> float:
    """Microseconds a page of writing to new shared memory, as extents are made of; it is freed again."""
    with mmap.mmap(-1, size) as area:
        pages = np.frombuffer(area, np.uint8)[::PAGE_BYTES]
        started = time.perf_counter()
        pages[:] = 1
        seconds = time.perf_counter() - started
        count = len(pages)
        del pages
    return seconds / count * 1e6


def describe(about: Mapping[str, object]) -> str:
    """The machine line."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in about.items())


def show(rows: Sequence[Row], about: Mapping[str, object]) -> None:
    """The report as a table in the terminal."""
    console = Console(width=max(100, Console().width))
    console.print(describe(about))
    table = Table("work", "ours", "baseline", "unit", "ratio", "target")
    for row in rows:
        table.add_row(row.name, *cells(row))
    console.print(table)


def cells(row: Row) -> list[str]:
    """Value, baseline, unit, ratio and target of a row as text."""
    return [
        number(row.value),
        "" if row.baseline is None else number(row.baseline),
        row.unit,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.target is None else f"{row.target:.2f} {'met' if met(row) else 'MISSED'}",
    ]


def number(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def write(path: Path, rows: Sequence[Row], about: Mapping[str, object], **more: object) -> None:
    """The report as JSON; ``more`` stands beside machine and rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "rows": [asdict(row) for row in rows], **more}
    path.write_text(json.dumps(report, indent=1) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a report."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def joined(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The old rows, those measured again replaced, the others after them."""
    found = {row.name: row for row in old}
    found.update({row.name: row for row in new})
    return list(found.values())
