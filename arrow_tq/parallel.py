"""Work that is cut into parts, which some threads take one after the other."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

PART_BYTES_MIN = 4 << 20
"""A read is not cut into parts of less than this: a thread costs what copying 100 KB does."""


def portions(sizes: npt.NDArray[np.integer], count: int) -> list[tuple[int, int]]:
    """Ranges ``[first, end)`` of about equal sums, at most so many, that make all of it together."""
    if count < 2 or len(sizes) < 2:
        return [(0, len(sizes))]
    ends = np.cumsum(sizes, dtype=np.int64)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) // count) + 1
    return list(itertools.pairwise(np.unique([0, *cuts.tolist(), len(ends)]).tolist()))


def run_all(calls: Sequence[Callable[[], None]], threads_max: int) -> None:
    """Run the calls, at most so many at a time; when none runs any more, raises the first error.

    The calling thread does its share: a thread that only waits for others has to be woken at the end.
    """
    waiting = deque(calls)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                call = waiting.popleft()
            except IndexError:
                return
            try:
                call()
            except BaseException as error:
                errors.append(error)

    helpers: list[threading.Thread] = []
    try:
        for number in range(1, min(len(calls), threads_max)):
            helper = threading.Thread(target=work, name=f"arrow-tq-part-{number}", daemon=True)
            helper.start()
            helpers.append(helper)
        work()
        for helper in helpers:
            helper.join()
    finally:
        # Also when interrupted: what helpers are at still writes to the caller's memory.
        waiting.clear()
        for helper in helpers:
            helper.join()
    try:
        if errors:
            raise errors[0]
    finally:
        # An error and a frame that names it are a cycle.
        errors.clear()
