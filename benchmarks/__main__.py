"""Figures of ours beside baselines measured in the same rounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import bundles, commits, handles, memory, samehost, shards, wire
from benchmarks.report import Row, show, write
from benchmarks.sizes import FULL, SMOKE

SUITES = {
    "memory": memory.rows,
    "wire": wire.rows,
    "samehost": samehost.rows,
    "commits": commits.rows,
    "shards": shards.rows,
    "handles": handles.rows,
    "bundles": bundles.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="NAME", help=f"of {', '.join(SUITES)}; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--smoke", action="store_true", help="sizes that only show that it runs")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}: expected {', '.join(SUITES)}")
    sizes = SMOKE if chosen.smoke else FULL
    rows: list[Row] = []
    for name in chosen.suites or SUITES:
        rows.extend(SUITES[name](sizes))
    show(rows)
    if chosen.json:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
