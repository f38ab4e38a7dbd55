"""Views of a session's tree: which steps make a segment of their own, in which order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Stretch:
    """A segment's own steps: ``first`` and those after it along the tree, up to ``last``.

    What lies before ``first`` on the path is context.
    """

    first: int
    last: int
    reason: str
    """Why it ends with ``last``."""


def lineage(parents: Sequence[int], cuts: Sequence[str | None]) -> list[Stretch]:
    """One stretch a leaf of the tree, where a cut step begins a tree of its own.

    So a step that is followed by cut steps alone ends a segment, and one that something goes on from
    does not: its tokens are in what goes on. In the order in which the last steps were committed.

    Args:
        parents: by step in commit order, the index of the step before it, or ``NO_PARENT``.
        cuts: by step, why it does not go on with its parent's segment; None: it does.
    """
    goes_on = [False] * len(parents)
    first_cut: list[str | None] = [None] * len(parents)
    firsts: list[int] = []
    for step, (parent, cut) in enumerate(zip(parents, cuts, strict=True)):
        begins = parent == NO_PARENT or cut is not None
        firsts.append(step if begins else firsts[parent])
        if parent == NO_PARENT:
            continue
        if cut is None:
            goes_on[parent] = True
        else:
            first_cut[parent] = first_cut[parent] or cut
    return [
        Stretch(firsts[step], step, first_cut[step] or "end")
        for step in range(len(parents))
        if not goes_on[step]
    ]


def timeline(parents: Sequence[int], cuts: Sequence[str | None]) -> list[Stretch]:
    """One stretch for each maximal run of steps, in commit order, each of which goes on with the one before.

    It ends with the reason of the cut step that follows, or ``branch`` where the next step follows
    another one.
    """
    stretches: list[Stretch] = []
    first = 0
    for step in range(1, len(parents)):
        reason = cuts[step] if parents[step] == step - 1 else "branch"
        if reason is not None:
            stretches.append(Stretch(first, step - 1, reason))
            first = step
    if parents:
        stretches.append(Stretch(first, len(parents) - 1, "end"))
    return stretches


VIEWS = {"lineage": lineage, "timeline": timeline}


def breaks(parents: Sequence[int], cuts: Sequence[str | None], stretches: Sequence[Stretch]) -> list[int]:
    """The steps after which the tokens so far are needed, ascending.

    These are where segments end, and the parents of what branches off, is cut, or begins a segment:
    between two of them lies a chain that is in the same segments from end to end.
    """
    found = {stretch.last for stretch in stretches}
    found.update(parents[stretch.first] for stretch in stretches)
    seen: set[int] = set()
    for parent, cut in zip(parents, cuts, strict=True):
        if cut is not None or parent in seen:
            found.add(parent)
        seen.add(parent)
    found.discard(NO_PARENT)
    return sorted(found)


def on_paths(
    parents: Sequence[int], values: Mapping[int, Sequence[int]], lasts: Sequence[int]
) -> list[list[int]]:
    """What the steps on the path to each of ``lasts`` have, by the last step's place; ``values`` is by step.

    Steps without values cost nothing a path.
    """
    nearest: list[int] = []
    for step, parent in enumerate(parents):
        nearest.append(step if step in values else NO_PARENT if parent == NO_PARENT else nearest[parent])
    found: list[list[int]] = []
    for last in lasts:
        found.append([])
        step = nearest[last]
        while step != NO_PARENT:
            found[-1] += values[step]
            step = NO_PARENT if parents[step] == NO_PARENT else nearest[parents[step]]
    return found
