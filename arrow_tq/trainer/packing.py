"""Packing segments into ranks and micro-batches, from their token counts alone; the same everywhere.

Every rank computes the whole plan from the same table and keeps its part, so that ranks agree without a
word. Nothing here depends on a random generator, a hash seed or a library's version: order comes from
integers alone.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import InvalidInput

Bins = list[list[int]]
OVERSIZE_NAMED_MAX = 3
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """What a plan does where segments do not fit it.

    Args:
        oversize: a segment longer than ``max_tokens``: ``refuse`` the plan, or give it a micro-batch
            ``alone``.
        short: a rank that has fewer segments than micro-batches: ``empty`` micro-batches, ``repeat`` its
            shortest segment in them (``micro.padding`` is true: weigh its loss with 0), or ``refuse``.
        micros_multiple_of: the number of micro-batches is a multiple of this (interleaved pipelines).
    """

    oversize: Literal["refuse", "alone"] = "refuse"
    short: Literal["empty", "repeat", "refuse"] = "empty"
    micros_multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.oversize not in ("refuse", "alone"):
            raise InvalidInput(f"oversize {self.oversize!r}: expected 'refuse' or 'alone'")
        if self.short not in ("empty", "repeat", "refuse"):
            raise InvalidInput(f"short {self.short!r}: expected 'empty', 'repeat' or 'refuse'")
        if type(self.micros_multiple_of) is not int or self.micros_multiple_of < 1:
            raise InvalidInput(f"micros_multiple_of {self.micros_multiple_of!r}: expected 1 or more")


def pack(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    world: int,
    max_tokens: int,
    seed: int | None,
    policy: PlanPolicy,
) -> list[Bins]:
    """By rank, its micro-batches as lists of indices into ``tokens``.

    Each index is in exactly one of them; every rank has the same number of them, some perhaps empty; none
    holds more than ``max_tokens`` tokens, but one segment alone where the policy allows it. Micro-batches
    with the same number on different ranks have like numbers of tokens.

    Args:
        tokens: ``[segments]`` the length of each.
        world: ranks.
        max_tokens: tokens of one micro-batch at most.
        seed: the order of segments and micro-batches; None keeps that of ``tokens``, longest micro-batch
            first.
        policy: what to do where segments do not fit.

    Raises:
        InvalidInput: a segment is longer than ``max_tokens``, or a rank has too few, and the policy
            refuses; names the segments' indices.
    """
    if world < 1 or max_tokens < 1:
        raise InvalidInput(f"world {world}, max_tokens {max_tokens}: expected 1 or more")
    lengths = np.asarray(tokens, dtype=np.int64)
    _refuse_oversize(lengths, max_tokens, policy)
    order = shuffled(len(lengths), seed)
    sizes = lengths.tolist()
    ranks = balance(order, sizes, world)
    packed = [best_fit(chosen, sizes, max_tokens) for chosen in ranks]
    count = max(len(bins) for bins in packed)
    count += -count % policy.micros_multiple_of
    places = {index: place for place, index in enumerate(order)}
    plans = [
        _ordered(_spread(chosen, bins, sizes, count, max_tokens), sizes, places)
        for chosen, bins in zip(ranks, packed, strict=True)
    ]
    if policy.short == "refuse" and any(not one for bins in plans for one in bins):
        raise InvalidInput(
            f"{len(lengths)} segments do not give {count} micro-batches to each of {world} ranks: "
            "with short='empty' or 'repeat' some are empty or padding"
        )
    slots = shuffled(count, None if seed is None else seed + 1)
    return [[bins[slot] for slot in slots] for bins in plans]


def shuffled(count: int, seed: int | None) -> list[int]:
    """``0 .. count - 1`` in an order that the seed decides (splitmix64 of seed and index)."""
    if seed is None:
        return list(range(count))
    with np.errstate(over="ignore"):
        state = np.uint64(seed & (1 << 64) - 1) * _GOLDEN ^ np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        state = (state ^ state >> np.uint64(30)) * _MIX[0]
        state = (state ^ state >> np.uint64(27)) * _MIX[1]
        state ^= state >> np.uint64(31)
    return [int(index) for index in np.argsort(state, kind="stable")]


def balance(order: Sequence[int], sizes: Sequence[int], bins: int) -> Bins:
    """The indices in so many lists of like total size: the longest first, each to the list that is least."""
    heap = [(0, 0, number) for number in range(bins)]
    found: Bins = [[] for _ in range(bins)]
    for index in sorted(order, key=lambda one: -sizes[one]):
        total, count, number = heap[0]
        found[number].append(index)
        heapq.heapreplace(heap, (total + sizes[index], count + 1, number))
    return found


def best_fit(chosen: Sequence[int], sizes: Sequence[int], room: int) -> Bins:
    """Few lists of at most ``room`` each: the longest first, each into the fullest list that has room.

    What is longer than ``room`` gets a list alone.
    """
    found: Bins = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(chosen, key=lambda one: -sizes[one]):
        place = bisect.bisect_left(rooms, (sizes[index], -1))
        if place == len(rooms):
            number = len(found)
            found.append([index])
            left = room - sizes[index]
        else:
            left, number = rooms.pop(place)
            found[number].append(index)
            left -= sizes[index]
        bisect.insort(rooms, (left, number))
    return found


def _spread(chosen: Sequence[int], bins: Bins, sizes: Sequence[int], count: int, room: int) -> Bins:
    """A rank's segments in exactly ``count`` lists, evenly where they fit so, none empty where it can be."""
    even = balance(chosen, sizes, count)
    if all(len(one) < 2 or sum(sizes[index] for index in one) <= room for one in even):
        return even
    found = [list(one) for one in bins]
    while len(found) < count:
        longest = max(
            range(len(found)), key=lambda at: (len(found[at]) > 1, sum(sizes[i] for i in found[at]))
        )
        if len(found[longest]) < 2:
            return found + [[] for _ in range(count - len(found))]
        found[longest : longest + 1] = balance(found[longest], sizes, 2)
    return found


def _ordered(bins: Bins, sizes: Sequence[int], places: dict[int, int]) -> Bins:
    """Longest list first; indices inside in the plan's order."""
    inside = [sorted(one, key=places.__getitem__) for one in bins]
    return sorted(
        inside, key=lambda one: (-sum(sizes[index] for index in one), places[one[0]] if one else len(places))
    )


def _refuse_oversize(lengths: npt.NDArray[np.int64], max_tokens: int, policy: PlanPolicy) -> None:
    if policy.oversize == "alone":
        return
    long = np.flatnonzero(lengths > max_tokens)
    if len(long):
        named = ", ".join(
            f"{index} ({lengths[index]} tokens)" for index in long[:OVERSIZE_NAMED_MAX].tolist()
        )
        more = f" and {len(long) - OVERSIZE_NAMED_MAX} more" if len(long) > OVERSIZE_NAMED_MAX else ""
        raise InvalidInput(
            f"segments {named}{more} are longer than max_tokens {max_tokens}: raise it, claim with "
            "a where on num_tokens, or give PlanPolicy(oversize='alone')",
            indices=long[: 8 * OVERSIZE_NAMED_MAX].tolist(),
            max_tokens=max_tokens,
        )
