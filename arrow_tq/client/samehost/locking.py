"""Memory of the server that is locked for as long as anybody views it, and no longer."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]


def lock_shared(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file under a shared lock of its own, whatever else is open to it.

    Raises:
        OSError: there is none, it is not for us, or the server takes it for something else.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def viewed(mapping: mmap.mmap, lock: int, size_bytes: int) -> Memory:
    """The first bytes of a mapping, locked until the last view of them is gone.

    Every view of an array holds the first one. ``lock`` is closed and never unlocked: a fork that views the
    same memory has the same lock, which then goes with the last of them. The mapping may live longer.
    """
    memory = np.frombuffer(mapping, np.uint8, size_bytes)
    weakref.finalize(memory, os.close, lock).atexit = False
    return memory
