"""Outcomes as tables and plots show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.outcome import Outcome

HEADERS = ("system", "put ms", "get ms", "put MB/s", "get MB/s", "first put/get", "build/rows ms", "")


def by_payload(report: Mapping[str, Any]) -> dict[str, list[Outcome]]:
    """The outcomes of a report, by payload."""
    found: dict[str, list[Outcome]] = {}
    for one in report.get("outcomes", []):
        found.setdefault(one["payload"], []).append(Outcome(**one))
    return found


def speeds(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Milliseconds of put and get, warm."""
    return {
        payload: {
            one.system: (one.warm("put_s") * 1e3, one.warm("get_s") * 1e3) for one in found if not one.failed
        }
        for payload, found in outcomes.items()
    }


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
