"""``python -m benchmarks.peers [--systems A,B] [--rounds N] [--json FILE] [PAYLOAD...]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers.driving import Outcome, measure
from benchmarks.peers.payloads import NAMES
from benchmarks.peers.system import SYSTEMS
from benchmarks.report import Row, against, machine, write

TARGETS: dict[tuple[str, str], tuple[float, float]] = {
    ("miles-16384-ndarray", "ray"): (10.0, 10.0),
    ("miles-16384-ndarray", "mooncake"): (4.0, 2.5),
    ("miles-16384-list", "ray"): (1.0, 1.0),
    ("r3-512-ragged", "transfer-queue"): (3.0, 5.0),
}
"""How many times faster than a peer, for put and for get."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("payloads", nargs="*", metavar="PAYLOAD", help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma separated; default all")
    parser.add_argument("--rounds", type=int, default=6, help="the first is reported as cold")
    parser.add_argument(
        "--half-layers", action="store_true", help="ask for half of the layers where possible"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    systems = chosen.systems.split(",")
    unknown = [one for one in systems if one not in SYSTEMS]
    if unknown:
        parser.error(f"no system {', '.join(unknown)}: expected {', '.join(SYSTEMS)}")
    console = Console(width=max(110, Console().width))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    outcomes: list[Outcome] = []
    for payload in chosen.payloads or NAMES:
        found = measure(systems, payload, chosen.rounds, chosen.half_layers)
        console.print(_table(payload, found))
        outcomes.extend(found)
    if chosen.json:
        write(chosen.json, rows_of(outcomes))


def _table(payload: str, outcomes: Sequence[Outcome]) -> Table:
    table = Table("system", "put ms", "get ms", "put MB/s", "get MB/s", "first put/get", "build/rows ms", "")
    table.title = payload
    for one in outcomes:
        if one.failed:
            table.add_row(one.system, "", "", "", "", "", "", one.failed[:160])
            continue
        put, get = one.warm("put_s"), one.warm("get_s")
        table.add_row(
            one.system,
            f"{put * 1e3:,.1f}",
            f"{get * 1e3:,.1f}",
            f"{one.nbytes / 1e6 / put:,.0f}",
            f"{one.nbytes / 1e6 / get:,.0f}",
            f"{one.cold('put_s') * 1e3:,.0f} / {one.cold('get_s') * 1e3:,.0f}",
            f"{one.warm('build_s') * 1e3:,.0f} / {one.warm('rows_s') * 1e3:,.0f}",
            "equal",
        )
    return table


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Ours against each peer: MB/s, and how many times theirs."""
    ours = {one.payload: one for one in outcomes if one.system == "arrow-tq" and not one.failed}
    rows: list[Row] = []
    for one in outcomes:
        mine = ours.get(one.payload)
        if mine is None or one.system == "arrow-tq" or one.failed:
            continue
        targets = TARGETS.get((one.payload, one.system), (None, None))
        for verb, target in zip(("put", "get"), targets, strict=True):
            size = one.nbytes / 1e6
            value, baseline = size / mine.warm(f"{verb}_s"), size / one.warm(f"{verb}_s")
            rows.append(against(f"{one.payload} {verb}, to {one.system}", value, baseline, "MB/s", target))
    return rows


if __name__ == "__main__":
    main()
