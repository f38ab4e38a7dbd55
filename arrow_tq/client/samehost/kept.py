"""Files that the server granted, mapped; and those that are full, kept mapped for when they come back."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from pathlib import Path

from arrow_tq.client.samehost.locking import Memory, lock_shared, viewed

KEEP_S = 8.0
"""How long a mapping is kept that nothing was written to."""
KEEP_BYTES = 512 << 20
"""Mapped and neither written nor viewed, at most, over all shards of a client. The server counts this memory,
and frees it when it likes: to us it is page tables, though a process's resident size shows it."""
UNTRIED_SHARE = 8
"""A part of that where none came back lately: a first put of any size then adds less than 256 MB to what is
resident, with the files that are written to and those that a busy server has still to adopt."""
KEEP_FILES = 64
"""At most, each with two descriptors."""


class WritableFile:
    """One file of the server, mapped. It is locked only while ``memory`` or a view of it is alive.

    Raises:
        OSError, ValueError: there is no such file, or not of this size.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        status = os.fstat(self._descriptor)
        self.inode = (status.st_dev, status.st_ino)
        self.size_bytes = size_bytes
        self._mapping = mmap.mmap(self._descriptor, size_bytes)
        self.kept_at = 0.0

    def memory(self) -> Memory:
        """All of it, locked. Raises ``OSError`` where the server takes it for something else, or cut it."""
        lock = lock_shared(f"/proc/self/fd/{self._descriptor}", os.O_RDWR)
        if os.fstat(lock).st_size < self.size_bytes:
            os.close(lock)
            raise OSError(errno.ESTALE, "the server cut it")
        return viewed(self._mapping, lock, self.size_bytes)

    def is_deleted(self) -> bool:
        """Whether the server has no name for it any more: only mappings hold its memory."""
        return os.fstat(self._descriptor).st_nlink == 0


class KeptFiles:
    """Mappings of files that were ended, without a lock: whoever is granted the file again need not map it.

    The server may give such a file to another client of the run, or delete it. Thread-safe.
    """

    def __init__(
        self, keep_s: float = KEEP_S, keep_bytes: int = KEEP_BYTES, keep_files: int = KEEP_FILES
    ) -> None:
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._keep_files = keep_files
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], WritableFile] = {}
        self._again_at = float("-inf")
        self._closed = False
        self.again = 0
        """Files that came back while they were mapped."""

    @property
    def kept_bytes(self) -> int:
        with self._lock:
            return sum(file.size_bytes for file in self._files.values())

    def take(self, path: str, size_bytes: int) -> WritableFile | None:
        """The kept mapping of the file that has this name now; None where there is none of that size."""
        status = Path(path).stat()
        with self._lock:
            found = self._files.pop((status.st_dev, status.st_ino), None)
            if found is None or found.size_bytes != size_bytes:
                return None
            self.again += 1
            self._again_at = time.monotonic()
            return found

    def keep(self, file: WritableFile) -> None:
        """Nothing is written to it any more. Not kept where there are enough.

        More files than are kept come back in the order in which they went: to let the oldest go each time
        would be to meet none of them again.
        """
        file.kept_at = time.monotonic()
        with self._lock:
            if self._closed:
                return
            self._files.pop(file.inode, None)
            lately = file.kept_at < self._again_at + self._keep_s
            bound = self._keep_bytes if lately else self._keep_bytes // UNTRIED_SHARE
            kept_bytes = sum(one.size_bytes for one in self._files.values())
            if len(self._files) < self._keep_files and kept_bytes + file.size_bytes <= bound:
                self._files[file.inode] = file

    def tend(self) -> bool:
        """Let go of what was deleted, and of what did not come back in time; whether any is left."""
        before = time.monotonic() - self._keep_s
        with self._lock:
            for inode, file in list(self._files.items()):
                if file.kept_at < before or file.is_deleted():
                    del self._files[inode]
            return bool(self._files)

    def close(self) -> None:
        """Let go of all, and keep none from now on."""
        with self._lock:
            self._closed = True
            self._files.clear()
