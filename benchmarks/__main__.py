"""Figures of ours beside baselines measured in the same rounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import commits, composing, handles, memory, plots, replay, samehost, shards, wire
from benchmarks.report import Row, joined, machine, read, show, stop_cleanly, write
from benchmarks.sizes import FULL, SMOKE

SUITES = {
    "memory": memory.rows,
    "wire": wire.rows,
    "samehost": samehost.rows,
    "commits": commits.rows,
    "shards": shards.rows,
    "handles": handles.rows,
    "composing": composing.rows,
    "replay": replay.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="NAME", help=f"of {', '.join(SUITES)}; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--add", action="store_true", help="keep rows of FILE that are not measured now")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write bench.svg there")
    parser.add_argument("--smoke", action="store_true", help="sizes that only show that it runs")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}: expected {', '.join(SUITES)}")
    stop_cleanly()
    sizes = SMOKE if chosen.smoke else FULL
    about = machine(sizes.touch_bytes, sizes.touch_away_s)
    adds = chosen.add and chosen.json and chosen.json.exists()
    rows: list[Row] = read(chosen.json) if adds else []
    for name in chosen.suites or SUITES:
        found = SUITES[name](sizes)
        show(found, about)
        rows = joined(rows, found)
        if chosen.json:
            # After each suite: a run that is cut short has not been for nothing.
            write(chosen.json, rows, about)
    if chosen.plots:
        plots.ratios(rows, chosen.plots / "bench.svg")


if __name__ == "__main__":
    main()
