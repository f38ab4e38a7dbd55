"""What keeps a process that handles large bodies small."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 256 << 10


def few_arenas() -> None:
    """Tell glibc to give large blocks back at once, and to keep few pools of memory for threads.

    Without this each thread that decoded a large answer keeps its memory. Elsewhere than on glibc
    nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_ARENA_MAX, 2)
    # Setting it also stops glibc from raising it with every large block that is freed.
    mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    mallopt(_M_TRIM_THRESHOLD, 4 * LARGE_BYTES)
