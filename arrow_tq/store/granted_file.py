"""A preallocated file that another process writes: this one never maps it.

Whoever may write to a file may truncate it, and a mapping of a truncated file ends its process. So everything
is read by ``pread`` into memory of our own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrow_tq.layout.columns import Buffer
from arrow_tq.store.mapped_file import PAGE, MappedFile, full
from arrow_tq.store.space import Space


class Torn(ValueError):
    """Bytes that were there are not any more: their writer cut the file."""


class GrantedFile(MappedFile):
    """One file of a client on this machine: the duties of a ``MappedFile``, over a mapping of nothing.

    All of it has blocks from the start, so that its writer never meets a full disk.
    """

    pool = "granted:"

    def __init__(
        self, path: Path, descriptor: int, size_bytes: int, allocated_bytes: int, space: Space
    ) -> None:
        super().__init__(path, descriptor, mmap.mmap(-1, PAGE), allocated_bytes, space)
        self.size_bytes = size_bytes
        self.ending = threading.RLock()
        """Held by whoever cuts it, or takes it for another extent."""

    @classmethod
    def create(cls, path: Path, size_bytes: int, space: Space) -> GrantedFile:
        """A new file of zeros.

        Raises:
            StoreFull: past the capacity, or the filesystem is full; nothing was left behind.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        space.take(size_bytes)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            space.give_back(size_bytes)
            raise full(error, path, "an extent of a client") from error
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            space.give_back(size_bytes)
            raise full(error, path, f"{size_bytes} bytes") from error
        return cls(path, descriptor, size_bytes, size_bytes, space)

    @classmethod
    def open(cls, path: Path, space: Space) -> GrantedFile:
        """A file of an earlier process, which its client may still write to."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        allocated = min(status.st_blocks * 512, -(-status.st_size // PAGE) * PAGE)
        space.adopt(allocated)
        return cls(path, descriptor, status.st_size, allocated, space)

    def memory(self) -> Callable[[int, int], Buffer]:
        return self.read

    def read(self, offset: int, size: int) -> Buffer:
        """Bytes from a place on, copied. Raises ``Torn`` where they are not all there."""
        return self.read_into(np.empty(size, np.uint8), offset)

    def read_into(self, out: npt.NDArray[np.uint8], offset: int) -> Buffer:
        """As many bytes as ``out`` has, copied there. Raises ``Torn`` where they are not all there."""
        done, size = 0, len(out)
        while done < size:
            count = os.preadv(self._descriptor, [out[done:].data], offset + done)
            if not count:
                raise Torn(f"{self.path}: cut at {offset + done}")
            done += count
        return out.data.toreadonly()

    def finish(self, used_bytes: int, end: bytes) -> bool:
        """End it after ``used_bytes``, where nobody maps it; False while somebody does."""
        if not self.nobody_maps():
            return False
        keep = min(-(-(used_bytes + len(end)) // PAGE) * PAGE, self.size_bytes)
        os.pwrite(self._descriptor, end.ljust(keep - used_bytes, b"\x00"), used_bytes)
        self.shrink(keep)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def nobody_maps(self) -> bool:
        with self.ending:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def reuse(self, path: Path, size_bytes: int) -> None:
        """Make it a new file of that name over the blocks it has. Nobody may map it.

        Raises:
            StoreFull: it has fewer blocks than that, and no more can be had; it is deleted.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.pwrite(self._descriptor, bytes(PAGE), 0)
            os.ftruncate(self._descriptor, size_bytes)
            self._allocate(size_bytes)
        except BaseException:
            self.delete()
            raise
        self.size_bytes = size_bytes
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.move(path)
