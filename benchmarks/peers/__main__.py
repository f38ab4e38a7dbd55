"""``python -m benchmarks.peers [--systems A,B] [--rounds N] [--json FILE [--add]] [PAYLOAD...]``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import plots
from benchmarks.peers.driving import Outcome, measure
from benchmarks.peers.payloads import NAMES, recipe
from benchmarks.peers.system import SYSTEMS
from benchmarks.report import Row, against, describe, joined, machine, read, write
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
    # Told to stop, it still stops everybody's servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = SMOKE if chosen.smoke else FULL
    about = machine(sizes.touch_bytes, sizes.touch_away_s)
    console = Console(width=max(110, Console().width))
    console.print(describe(about))
    old = _read(chosen.json) if chosen.add and chosen.json and chosen.json.exists() else {}
    outcomes: dict[str, list[Outcome]] = dict(old)
    for payload in chosen.payloads or NAMES:
        outcomes[payload] = measure(systems, payload, chosen.rounds)
        console.print(table(payload, outcomes[payload]))
        rows = [row for found in outcomes.values() for row in rows_of(found)]
        if chosen.json:
            # After each payload: a run that is cut short has not been for nothing.
            kept = read(chosen.json) if chosen.add and chosen.json.exists() else []
            everything = [asdict(one) for found in outcomes.values() for one in found]
            write(chosen.json, joined(kept, rows), about, outcomes=everything)
    if chosen.plots:
        plots.speeds(speeds(outcomes), chosen.plots / "peers.svg")


def _read(path: Path) -> dict[str, list[Outcome]]:
    """Outcomes by payload."""
    found: dict[str, list[Outcome]] = {}
    for one in json.loads(path.read_text()).get("outcomes", []):
        found.setdefault(one["payload"], []).append(Outcome(**one))
    return found


def speeds(outcomes: dict[str, list[Outcome]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Milliseconds of put and get, warm."""
    return {
        payload: {
            one.system: (one.warm("put_s") * 1e3, one.warm("get_s") * 1e3) for one in found if not one.failed
        }
        for payload, found in outcomes.items()
    }


HEADERS = ("system", "put ms", "get ms", "put MB/s", "get MB/s", "first put/get", "build/rows ms", "")


def table(payload: str, outcomes: Sequence[Outcome]) -> Table:
    shown = Table(*HEADERS, title=title(payload, outcomes))
    for one in outcomes:
        shown.add_row(*cells(one))
    return shown


def title(payload: str, outcomes: Sequence[Outcome]) -> str:
    """The payload's name, and how much of it there was."""
    some = next((one for one in outcomes if one.samples), None)
    if some is None:
        return payload
    scaled = "" if some.samples == some.whole else f" (scaled to this memory, of {some.whole:,})"
    return f"{payload}: {some.samples:,} samples{scaled}, {some.nbytes / 1e6:,.0f} MB"


def cells(one: Outcome) -> list[str]:
    """A system's row."""
    if one.failed:
        return [one.system, "", "", "", "", "", "", one.failed[:160]]
    put, get = one.warm("put_s"), one.warm("get_s")
    return [
        one.system,
        f"{put * 1e3:,.1f}",
        f"{get * 1e3:,.1f}",
        f"{one.nbytes / 1e6 / put:,.0f}",
        f"{one.nbytes / 1e6 / get:,.0f}",
        f"{one.cold('put_s') * 1e3:,.0f} / {one.cold('get_s') * 1e3:,.0f}",
        f"{one.warm('build_s') * 1e3:,.0f} / {one.warm('rows_s') * 1e3:,.0f}",
        "equal",
    ]


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
