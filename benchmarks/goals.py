"""The speeds to reach, and where they were measured: ``python -m benchmarks.goals [DIR]``.

Reads the reports that ``make bench`` and ``make bench-peers`` leave in DIR.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import Row, met, number, read

FIGURES = Path("build/figures")
REPORTS = {"bench.json": "make bench", "peers.json": "make bench-peers", "head.json": "make bench-peers"}


@dataclass(frozen=True, slots=True)
class Goal:
    """One kind of work, what it should reach, and the rows that say whether it does."""

    work: str
    target: str
    report: str
    rows: tuple[str, ...]


GOALS = (
    Goal(
        "append on the same host, checksum included, warm extents, same pieces; sustained beside",
        "same dtype >= 65 % of memcpy, int32 narrowed to uint8 >= 70 % of numpy's cast",
        "bench.json",
        (
            "append uint8, checksum included, to memcpy",
            "append int32 narrowed to uint8, to numpy's cast",
            "append uint8, sustained into fresh memory",
        ),
    ),
    Goal(
        "read back to int32 `[T, L, K]`, same host",
        ">= 80 % of numpy's own uint8 -> int32 copy",
        "bench.json",
        (
            "read back to int32, to numpy's own copy",
            "get on the same host as int32, to numpy's own widening copy",
        ),
    ),
    Goal(
        "DoPut and DoGet between processes over TCP",
        ">= 90 % of a bare pyarrow Flight server",
        "bench.json",
        ("DoPut over TCP, to bare Flight", "DoGet over TCP, to bare Flight"),
    ),
    Goal(
        "Miles dict, 16,384 samples of ndarray rows, three processes",
        "get >= 10x Ray, >= 2.5x Mooncake; put >= 10x Ray, >= 4x Mooncake",
        "peers.json",
        tuple(
            f"miles-16384-ndarray {verb}, to {peer}"
            for peer in ("ray", "mooncake")
            for verb in ("put", "get")
        ),
    ),
    Goal(
        "the same with Python-list rows",
        "faster than Ray",
        "peers.json",
        ("miles-16384-list put, to ray", "miles-16384-list get, to ray"),
    ),
    Goal(
        "512 ragged samples with R3 (347 MB) against TransferQueue, warm",
        "one batch: put >= 3x, get >= 5x; one put a trajectory: >= 10x",
        "peers.json",
        (
            "r3-512-ragged put, to transfer-queue",
            "r3-512-ragged get, to transfer-queue",
            "r3-512-trajectories put, to transfer-queue",
        ),
    ),
    Goal(
        "step commits, 64 clients, disk",
        "engine >= 10,000/s, p99 < 10 ms; over the wire >= 5,000/s, p99 < 30 ms",
        "bench.json",
        tuple(
            f"step commits, {where}{what}" for where in ("engine", "over the wire") for what in ("", ", p99")
        ),
    ),
    Goal(
        "compose a manifest of 1e6 spans; expand 1e7 handles",
        "< 1 s each",
        "bench.json",
        ("compose spans, to 1e6 in 1 s", "expand handles, to all of them in 1 s"),
    ),
    Goal(
        "a 3.7 GB trajectory (12 x 2048 int32, chunks >= 10 MB)",
        "manifest < 8 KB; what travels with the sample is its segment id",
        "bench.json",
        ("manifest of a long trajectory", "what travels with the sample: its segment id"),
    ),
    Goal(
        "head-node memory, references against whole payloads (peak PSS)",
        ">= 85 % less (Dressage: 67 %)",
        "head.json",
        ("head: memory saved, references for whole payloads",),
    ),
    Goal(
        "a training step with replay on, over the same step without",
        "< 3 % more",
        "bench.json",
        ("routing replay, to the rest of the step",),
    ),
)

HEADERS = ("work", "target", "figure", "ours", "baseline", "ratio", "")


def lines(folder: Path) -> list[list[str]]:
    """The table of goals, a line a row; a row that no report has says which program measures it."""
    reports = {name: _rows(folder / name) for name in REPORTS}
    found: list[list[str]] = []
    for goal in GOALS:
        work, target = goal.work, goal.target
        for name in goal.rows:
            row = reports[goal.report].get(name)
            figure = ["", "", "", f"not measured: {REPORTS[goal.report]}"] if row is None else _figure(row)
            found.append([work, target, name, *figure])
            work = target = ""
    return found


def _rows(path: Path) -> dict[str, Row]:
    return {row.name: row for row in read(path)} if path.exists() else {}


def _figure(row: Row) -> list[str]:
    verdict = "" if row.target is None else "met" if met(row) else "MISSED"
    baseline = "" if row.baseline is None else f"{number(row.baseline)} {row.unit}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return [f"{number(row.value)} {row.unit}", baseline, ratio, verdict]


def main(arguments: Sequence[str]) -> None:
    console = Console(width=max(140, Console().width))
    table = Table(*HEADERS, title="the speeds to reach")
    for line in lines(Path(arguments[0]) if arguments else FIGURES):
        table.add_row(*line, end_section=False)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
