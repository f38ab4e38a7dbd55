"""Peak memory by component as tables show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MIB = 1 << 20
HEADERS = ("peak PSS over its start, MiB", "whole payloads", "references", "less")
DRESSAGE = ("Dressage's head node, GiB (published)", "757", "247", "67 %")


def table(peaks: Mapping[str, Sequence[int | None]]) -> list[list[str]]:
    """Component, MiB with whole payloads, MiB with references, how much less; and the published table."""
    found = []
    for name, (before, after) in peaks.items():
        less = "" if not before or after is None else f"{1 - after / before:.0%}".replace("%", " %")
        found.append([name, *("" if one is None else f"{one / MIB:,.0f}" for one in (before, after)), less])
    return [*found, list(DRESSAGE)]
