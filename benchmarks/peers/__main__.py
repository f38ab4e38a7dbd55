"""``python -m benchmarks.peers [--systems A,B] [--rounds N] [--json FILE [--add]] [PAYLOAD...]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import plots
from benchmarks.peers import table
from benchmarks.peers.driving import Lineup
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.payloads import NAMES, recipe
from benchmarks.peers.system import SYSTEMS
from benchmarks.report import Row, against, describe, machine, stop_cleanly, write
from benchmarks.sizes import FULL, SMOKE

TARGETS: dict[tuple[str, str], tuple[float, float | None]] = {
    ("miles-16384-ndarray", "ray"): (10.0, 10.0),
    ("miles-16384-ndarray", "mooncake"): (4.0, 2.5),
    ("miles-16384-list", "ray"): (1.0, 1.0),
    ("r3-512-ragged", "transfer-queue"): (3.0, 5.0),
    ("r3-512-trajectories", "transfer-queue"): (10.0, None),
}
"""How many times faster than a peer, for put and for get; None: no target."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("payloads", nargs="*", metavar="PAYLOAD", help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma separated; default all")
    parser.add_argument("--rounds", type=int, default=6, help="the first is reported as cold")
    parser.add_argument("--smoke", action="store_true", help="do not spend time on the machine line")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--add", action="store_true", help="keep what FILE has and is not measured now")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write peers.svg there")
    chosen = parser.parse_args()
    systems = chosen.systems.split(",")
    unknown = [one for one in systems if one not in SYSTEMS]
    if unknown:
        parser.error(f"no system {', '.join(unknown)}: expected {', '.join(SYSTEMS)}")
    for payload in chosen.payloads:
        try:
            recipe(payload)
        except ValueError as error:
            parser.error(str(error))
    stop_cleanly()
    sizes = SMOKE if chosen.smoke else FULL
    about = machine(sizes.touch_bytes, sizes.touch_away_s)
    console = Console(width=max(110, Console().width))
    console.print(describe(about))
    outcomes: dict[str, list[Outcome]] = {}
    if chosen.add and chosen.json and chosen.json.exists():
        outcomes = table.by_payload(json.loads(chosen.json.read_text()))
    with Lineup(systems) as lineup:
        for payload in chosen.payloads or NAMES:
            outcomes[payload] = lineup.measure(payload, chosen.rounds)
            console.print(_shown(payload, outcomes[payload]))
            if chosen.json:
                # After each payload: a run that is cut short has not been for nothing.
                _write(chosen.json, outcomes, about)
    if chosen.plots:
        plots.speeds(table.speeds(outcomes), chosen.plots / "peers.svg")


def _write(path: Path, outcomes: Mapping[str, list[Outcome]], about: Mapping[str, object]) -> None:
    """All outcomes, in the order in which payloads are named."""
    ordered = [outcomes[name] for name in dict.fromkeys([*NAMES, *outcomes]) if name in outcomes]
    rows = [row for found in ordered for row in rows_of(found)]
    write(path, rows, about, outcomes=[asdict(one) for found in ordered for one in found])


def _shown(payload: str, outcomes: Sequence[Outcome]) -> Table:
    shown = Table(*table.HEADERS, title=table.title(payload, outcomes))
    for one in outcomes:
        shown.add_row(*table.cells(one))
    return shown


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Ours against each peer: MB/s, and how many times theirs."""
    mine = next((one for one in outcomes if one.system == "arrow-tq" and not one.failed), None)
    if mine is None:
        return []
    rows: list[Row] = []
    for one in outcomes:
        if one is mine or one.failed:
            continue
        targets = TARGETS.get((one.payload, one.system), (None, None))
        for verb, target in zip(("put", "get"), targets, strict=True):
            size = one.nbytes / 1e6
            value, baseline = size / mine.warm(f"{verb}_s"), size / one.warm(f"{verb}_s")
            rows.append(against(f"{one.payload} {verb}, to {one.system}", value, baseline, "MB/s", target))
    return rows


if __name__ == "__main__":
    main()
