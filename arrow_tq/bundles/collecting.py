"""Many Python objects at once, without the collector looking at each of them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold the cyclic collector while lists of numbers are made, none of which can be in a cycle.

    Its passes visit every number of every new list, three times over: half of the time it takes to make
    them. Whoever finds it disabled leaves it so, so that of two threads the one that disabled it enables it.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
