"""A preallocated, mapped file that grows in steps and is appended to.

The file's size is set once to its maximum (sparse) so that it is mapped once; blocks are allocated in
steps with ``posix_fallocate``, so that a full disk is a clean error and never SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from arrow_tq.layout.columns import Buffer
from arrow_tq.populating import populate
from arrow_tq.store.space import Space
from arrow_tq_schemas.errors import StoreFull

PAGE = mmap.PAGESIZE
_FULL = (errno.ENOSPC, errno.EDQUOT)


class MappedFile:
    """One file, mapped. Holds ``flock(LOCK_SH)`` while it is: readers of other processes do the same.

    Attributes:
        path: where it is.
        allocated_bytes: bytes from the start that have blocks.
        map: the mapping, of ``size_bytes``.
        view: the same, read-only whatever a reader does to its array's flags.
    """

    pool = ""
    """Files of one pool may become one another's memory."""

    def __init__(
        self, path: Path, descriptor: int, mapping: mmap.mmap, allocated_bytes: int, space: Space
    ) -> None:
        self.path = path
        self.map = mapping
        self.view = memoryview(mapping).toreadonly()
        self.size_bytes = len(mapping)
        self.allocated_bytes = allocated_bytes
        self._descriptor = descriptor
        self._space = space
        self._growing = threading.Lock()
        self._populated_bytes = 0

    @classmethod
    def create(cls, path: Path, size_bytes: int, space: Space) -> MappedFile:
        """A new empty file. Nothing is allocated yet.

        Raises:
            StoreFull: the filesystem has no room for another file.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise full(error, path, "another extent") from error
        try:
            os.ftruncate(descriptor, size_bytes)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            mapping = mmap.mmap(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return cls(path, descriptor, mapping, 0, space)

    @classmethod
    def open(cls, path: Path, space: Space) -> MappedFile:
        """A file of an earlier process. Its blocks are counted as used."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            status = os.fstat(descriptor)
            mapping = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        allocated = min(status.st_blocks * 512, _page_up(status.st_size))
        space.adopt(allocated)
        return cls(path, descriptor, mapping, allocated, space)

    def memory(self) -> Callable[[int, int], Buffer]:
        """How bytes of it are looked at, by place and count: views, until it is unmapped."""
        view = self.view
        return lambda first, size: view[first : first + size]

    def grow(self, wanted_bytes: int, step_bytes: int) -> None:
        """Have blocks for the first ``wanted_bytes``, allocating ``step_bytes`` at least.

        Raises:
            StoreFull: past the capacity, or the filesystem is full; nothing was allocated.
        """
        if wanted_bytes <= self.allocated_bytes:
            # Read without the lock: it only grows while there are writers, and they must not wait for
            # memory that is being made ready further ahead.
            return
        with self._growing:
            if wanted_bytes <= self.allocated_bytes:
                return
            target = min(_page_up(max(wanted_bytes, self.allocated_bytes + step_bytes)), self.size_bytes)
            try:
                self._allocate(target)
            except StoreFull:
                # The last bytes of a nearly full store are worth a smaller step.
                self._allocate(_page_up(wanted_bytes))

    def populate(self) -> None:
        """Fault in what is allocated, ahead of writing; where the kernel cannot, the writer pays."""
        with self._growing:
            first, last = self._populated_bytes, self.allocated_bytes // PAGE * PAGE
            if last <= first:
                return
            self._populated_bytes = last
            base = np.frombuffer(self.map, np.uint8).ctypes
            code = populate(base.data + first, last - first)
            if code not in (0, errno.EINVAL, errno.EFAULT, errno.ENOMEM):
                raise OSError(code, os.strerror(code), str(self.path))

    def trim(self, used_bytes: int) -> None:
        """Give back the blocks past ``used_bytes`` of a file that is still appended to."""
        with self._growing:
            keep = min(_page_up(used_bytes), self.allocated_bytes)
            if keep == self.allocated_bytes:
                return
            os.ftruncate(self._descriptor, keep)
            os.ftruncate(self._descriptor, self.size_bytes)
            self._space.give_back(self.allocated_bytes - keep)
            self.allocated_bytes = keep
            self._populated_bytes = min(self._populated_bytes, keep)

    def data_end(self) -> int:
        """End of the last block that was written; past it there are only holes, which a read would fill."""
        end = 0
        try:
            while True:
                start = os.lseek(self._descriptor, end, os.SEEK_DATA)
                end = os.lseek(self._descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        return end

    def sync(self) -> None:
        """Return when what was written is on the device."""
        os.fdatasync(self._descriptor)

    def write(self, offset: int, content: bytes) -> None:
        """Write through the descriptor (recovery maps files read-only)."""
        os.pwrite(self._descriptor, content, offset)

    def shrink(self, used_bytes: int) -> None:
        """Give back what is past ``used_bytes``. Nobody was told of anything there."""
        with self._growing:
            keep = min(_page_up(used_bytes), self.size_bytes)
            os.ftruncate(self._descriptor, keep)
            # So that whoever is about to make memory ready finds that there is none to make.
            self.size_bytes = keep
            freed = max(self.allocated_bytes - keep, 0)
            self.allocated_bytes -= freed
            self._space.give_back(freed)

    def unmap(self) -> bool:
        """Let go of the mapping; False while somebody in this process still has a view of it."""
        try:
            self.view.release()
            self.map.close()
        except BufferError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptor, and with it the lock; the mapping lives as long as its views."""
        with self._growing:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def nobody_maps(self) -> bool:
        """Once its name is gone from where readers look: whether nobody maps it any more.

        Our own mapping is closed where no view of it is left; other processes' are seen by their lock.
        """
        if not self.unmap():
            return False
        # A lock belongs to the open file, which our forks share: only another one tells whether they map it.
        try:
            other = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return False
        os.close(self._descriptor)
        self._descriptor = other
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def delete(self) -> None:
        """Remove it, and give its bytes back. Nobody may map it."""
        self.path.unlink(missing_ok=True)
        self.forget()

    def free(self) -> None:
        """The same while it is locked for us alone: its memory goes at once, whoever keeps it mapped.

        A mapping without a lock is not looked at; of a file that is only unlinked it would hold the memory.
        """
        os.ftruncate(self._descriptor, 0)
        self.delete()

    def forget(self) -> None:
        """Close it, and count its bytes no longer."""
        self.close()
        self._space.give_back(self.allocated_bytes)
        self.allocated_bytes = 0

    def move(self, path: Path) -> None:
        """Give it another name on the same filesystem; mappings go on."""
        self.path.rename(path)
        self.path = path

    def reuse(self, path: Path, size_bytes: int) -> None:
        """Make it a new file of that name and size over the blocks it has. Nobody may map it.

        Its first page is zeroed, so that it is no extent until something is written; what else is left in
        it lies past every published range and is overwritten in order.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        os.pwrite(self._descriptor, bytes(PAGE), 0)
        os.ftruncate(self._descriptor, size_bytes)
        self.map = mmap.mmap(self._descriptor, size_bytes)
        self.view = memoryview(self.map).toreadonly()
        self.size_bytes = size_bytes
        self._populated_bytes = 0
        self.move(path)

    def _allocate(self, target: int) -> None:
        more = target - self.allocated_bytes
        if more <= 0:
            return
        self._space.take(more)
        try:
            os.posix_fallocate(self._descriptor, self.allocated_bytes, more)
        except OSError as error:
            self._space.give_back(more)
            raise full(error, self.path, f"{more} bytes") from error
        self.allocated_bytes = target


def discard(path: Path) -> None:
    """Remove a file of an earlier process, and its memory at once where nobody views it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
        path.unlink()
    finally:
        os.close(descriptor)


def full(error: OSError, path: Path, what: str) -> Exception:
    """``StoreFull`` where the filesystem has no room, else the error itself."""
    if error.errno not in _FULL:
        return error
    return StoreFull(f"no room for {what}: the filesystem of {path} is full", path=str(path))


def _page_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
