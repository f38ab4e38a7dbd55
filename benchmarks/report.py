"""Rows, medians of interleaved rounds, and how they are printed."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def show(rows: Sequence[Row]) -> None:
    """The report as a table in the terminal."""
    about = machine()
    console = Console(width=max(100, Console().width))
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    table = Table("work", "ours", "baseline", "unit", "ratio", "target")
    for row in rows:
        met = row.target is None or (row.ratio is not None and row.ratio >= row.target)
        table.add_row(
            row.name,
            f"{row.value:,.2f}" if row.value < 1000 else f"{row.value:,.0f}",
            "" if row.baseline is None else f"{row.baseline:,.2f}",
            row.unit,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.target is None else f"{row.target:.2f} {'met' if met else 'MISSED'}",
        )
    console.print(table)


def write(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(
        json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
    )
