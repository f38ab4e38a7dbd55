"""The page of speeds from the reports: ``python -m benchmarks.docs [--check]``.

Reads ``docs/plots/*.json``, draws the plots beside them, and writes the blocks of ``docs/speed.md`` that
lie between ``<!-- NAME: generated -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals, plots
from benchmarks.curves import exponent
from benchmarks.report import Row, cells, describe, read

ROOT = Path(__file__).parents[1]
PLOTS, PAGE = ROOT / "docs" / "plots", ROOT / "docs" / "speed.md"
_BLOCK = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)
CURVE_BOUND = 1.1


def page(text: str, folder: Path) -> str:
    """The page with its blocks made anew.

    Raises:
        KeyError: a block that nobody makes.
    """
    return _BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](folder).rstrip() + "\n" + found[3], text)


def draw(folder: Path) -> None:
    """The plots of every report that there is."""
    if (folder / "bench.json").exists():
        plots.ratios(read(folder / "bench.json"), folder / "bench.svg")
    for name, curve in _report(folder, "curves").get("curves", {}).items():
        plots.curve(name, curve["unit"], curve["seconds"], folder / f"{name}.svg")
    payloads = _speeds(folder)
    if payloads:
        plots.speeds(payloads, folder / "peers.svg")


def _goals(folder: Path) -> str:
    return _table(goals.HEADERS, goals.lines(folder))


def _bench(folder: Path) -> str:
    rows = read(folder / "bench.json") if (folder / "bench.json").exists() else []
    if not rows:
        return _about(folder, "bench")
    return f"{_about(folder, 'bench')}{_rows_table(rows)}\n![ratios to baselines](plots/bench.svg)\n"


def _peers(folder: Path) -> str:
    from benchmarks.peers import table

    found = [_about(folder, "peers")]
    for payload, outcomes in table.by_payload(_report(folder, "peers")).items():
        found.append(f"**{table.title(payload, outcomes)}**\n\n")
        found.append(_table(table.HEADERS, [table.cells(one) for one in outcomes]) + "\n")
    if len(found) > 1:
        found.append("![put and get by system](plots/peers.svg)\n")
    return "".join(found)


def _ratios(folder: Path) -> str:
    rows = read(folder / "peers.json") if (folder / "peers.json").exists() else []
    return _rows_table(rows)


def _curves(folder: Path) -> str:
    report = _report(folder, "curves")
    found = [_about(folder, "curves")]
    for name, curve in report.get("curves", {}).items():
        lines = []
        for work, points in curve["seconds"].items():
            power = exponent(points)
            (first, _), (size, seconds) = points[0], points[-1]
            verdict = "met" if power <= CURVE_BOUND else "MISSED"
            each = f"{seconds / size * 1e6:,.1f} us"
            lines.append([work, f"{first:,} to {size:,} {curve['unit']}", each, f"{power:.2f}", verdict])
        found.append(f"### By {name}\n\n![cost by {name}](plots/{name}.svg)\n\n")
        found.append(
            _table(("work", "sizes", "one at the largest", "exponent", f"<= {CURVE_BOUND}"), lines) + "\n"
        )
    return "".join(found)


def _head(folder: Path) -> str:
    from benchmarks.peers import peaks

    report = _report(folder, "head")
    if not report:
        return "Not measured.\n"
    title = f"{_about(folder, 'head')}{report['title']}.\n\n"
    return title + _table(peaks.HEADERS, peaks.table(report["peaks"]))


BLOCKS: Mapping[str, Callable[[Path], str]] = {
    "goals": _goals,
    "bench": _bench,
    "peers": _peers,
    "ratios": _ratios,
    "curves": _curves,
    "head": _head,
}


def _report(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _speeds(folder: Path) -> Mapping[str, Mapping[str, tuple[float, float]]]:
    from benchmarks.peers import table

    return table.speeds(table.by_payload(_report(folder, "peers")))


def _about(folder: Path, name: str) -> str:
    """The machine that a report is of."""
    report = _report(folder, name)
    return f"Measured on: {describe(report['machine'])}.\n\n" if report else "Not measured.\n\n"


def _rows_table(rows: Sequence[Row]) -> str:
    headers = ("work", "ours", "baseline", "unit", "ratio", "target")
    return _table(headers, [[row.name, *cells(row)] for row in rows])


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    rows = [headers, ["---"] * len(headers), *lines]
    return "".join("| " + " | ".join(_cell(cell) for cell in row) + " |\n" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page differs")
    chosen = parser.parse_args()
    text = PAGE.read_text()
    made = page(text, PLOTS)
    if chosen.check:
        return int(made != text)
    PAGE.write_text(made)
    draw(PLOTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
