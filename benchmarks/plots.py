"""Reports as SVG; the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Row, met

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MET, MISSED, FREE = "#2a7", "#c43", "#888"
BAR_INCHES = 0.28

Points = Sequence[tuple[int, float]]


@contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Axes that are written as an SVG at the end."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure.add_subplot()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    # One space at the end of each line of a path: nobody needs it in a repository.
    lines = (line.rstrip() for line in path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")


def ratios(rows: Sequence[Row], path: Path) -> None:
    """A bar a row: the ratio to its baseline, with a mark at its target."""
    shown = [row for row in rows if row.ratio is not None][::-1]
    with _figure(path, 9, 1 + BAR_INCHES * len(shown)) as axes:
        colours = [FREE if row.target is None else MET if met(row) else MISSED for row in shown]
        places = range(len(shown))
        axes.barh(places, [row.ratio or 0 for row in shown], color=colours, height=0.7)
        for place, row in zip(places, shown, strict=True):
            if row.target is not None:
                axes.plot([row.target] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
            axes.annotate(
                f" {row.ratio:.2f}", (row.ratio or 0, place), va="center", xytext=(2, 0),
                textcoords="offset points",
            )  # fmt: skip
        axes.set(yticks=places, yticklabels=[row.name for row in shown], xscale="log")
        axes.set(
            xlabel="ours to the baseline, larger is better; black: target", ylim=(-0.6, len(shown) - 0.4)
        )
        axes.margins(x=0.15)
        axes.axvline(1, color="black", linewidth=0.5)


def curve(name: str, unit: str, seconds: Mapping[str, Points], path: Path) -> None:
    """Seconds over size, both logarithmic, with a line of slope one to compare with."""
    with _figure(path, 6, 4) as axes:
        for work, points in seconds.items():
            axes.loglog(*zip(*points, strict=True), marker="o", label=work)
        longest = max(seconds.values(), key=lambda points: points[-1][1])
        (first, cost), last = longest[0], longest[-1][0]
        axes.loglog([first, last], [cost, cost * last / first], "k:", linewidth=1, label="linear")
        axes.set(xlabel=unit, ylabel="seconds", title=f"cost by {name}")
        axes.legend(fontsize=8)
        axes.grid(True, which="both", alpha=0.2)


def speeds(payloads: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    """Milliseconds of put (full colour) and get (pale) of each system, a group of bars a payload."""
    systems = list(dict.fromkeys(system for found in payloads.values() for system in found))
    names = list(payloads)[::-1]
    bars = 2 * len(systems)
    height = 0.85 / bars
    with _figure(path, 9, 1 + 0.11 * (bars + 1) * len(names)) as axes:
        for index, system in enumerate(systems):
            for verb, alpha in ((0, 1.0), (1, 0.45)):
                shift = 0.425 - (2 * index + verb + 0.5) * height
                found = [
                    (place + shift, payloads[name][system][verb])
                    for place, name in enumerate(names)
                    if system in payloads[name]
                ]
                places, figures = [place for place, _ in found], [figure for _, figure in found]
                label = f"{system}, {('put', 'get')[verb]}"
                axes.barh(places, figures, height=height, color=f"C{index}", alpha=alpha, label=label)
        axes.set(yticks=range(len(names)), yticklabels=names, xlabel="ms, smaller is better", xscale="log")
        axes.set(ylim=(-0.6, len(names) - 0.4))
        axes.figure.legend(fontsize=8, loc="outside upper center", ncols=len(systems))
        axes.grid(True, axis="x", alpha=0.3)
