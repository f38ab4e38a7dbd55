"""Answers that count only if whoever made them was the shard to the end.

A process can be stopped between any two lines, for any time, and another one be the shard when it goes on.
What it found out before is then as old as its stop: rows and verdicts, and errors too, for a chunk that it
does not have is not lost. So it is asked once more when the answer is made, with a clock that went on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from arrow_tq.backend import Rows
from arrow_tq_schemas.errors import ArrowTQError

Check = Callable[[], None]
"""Raises where this process is not the shard."""


@contextmanager
def held(check: Check) -> Iterator[None]:
    """Around the making of one answer: what ``check`` raises goes before it, and before what was raised."""
    check()
    try:
        yield
    finally:
        check()


def held_rows(blocks: Iterable[Rows], check: Check) -> Iterator[Rows]:
    """The same rows, and their end or their error if that may be given; ``check`` was asked before.

    Before rows leave it is asked again, once a message: that costs less than once a block.
    """
    try:
        yield from blocks
    except ArrowTQError:
        check()
        raise
    check()
