"""A store's directory: who owns it, and where its memory tier is."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from arrow_tq_schemas.errors import Conflict, InvalidInput, StoreInUse

LOCK_NAME = "lock"
NOTE_NAME = "store.json"
OWNER_NOTE = "data_dir"
"""In a memory directory: the data directory that it belongs to."""
CAPACITY_SHARE = 0.8
"""Share of the free space that a store takes at most when nobody says."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Directory:
    """An owned data directory. The lock goes with the process, whatever ends it."""

    path: Path
    descriptor: int
    pid: int

    @classmethod
    def claim(cls, path: Path, url: str | None) -> Directory:
        """Own ``path``, creating it.

        Raises:
            StoreInUse: another process (or another store object of this one) has it; ``details`` name
                its pid and, for a server, its URL.
            InvalidInput: it is not a directory that can be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(f"store directory {str(path)!r}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _in_use(path, descriptor) from None
        owner = json.dumps({"pid": os.getpid(), "url": url}).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)
        return cls(path, descriptor, os.getpid())

    def lock_id(self) -> str:
        """The locked file on this machine since its start, as 32 hex digits. Of two processes that have the
        same one the earlier has ended; a copied directory has another.
        """
        if not BOOT_ID.exists():
            return uuid.uuid4().hex
        # An inode is used again only when nobody has the file open any more, which its locker has.
        found = os.fstat(self.descriptor)
        name = f"{BOOT_ID.read_text().strip()} {found.st_dev} {found.st_ino}"
        return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()

    def memory_dir(self, wanted: Path | None) -> Path:
        """The memory tier's directory: as asked, else as before, else under the data directory."""
        note = self.path / NOTE_NAME
        if wanted is None and note.exists():
            wanted = Path(json.loads(note.read_text())["memory_dir"])
        chosen = (wanted or self.path / "memory").absolute()
        if not wanted or not chosen.is_relative_to(self.path.absolute()) or not note.exists():
            _write_note(note, {"memory_dir": str(chosen)})
        return chosen

    @staticmethod
    def default_capacity_bytes(memory_dir: Path) -> int:
        """A share of what is free where the memory tier lives, what is stored there already included."""
        memory_dir.mkdir(parents=True, exist_ok=True)
        space = os.statvfs(memory_dir)
        stored = sum(file.stat().st_blocks * 512 for file in memory_dir.rglob("*") if file.is_file())
        return max(int(CAPACITY_SHARE * (space.f_bavail * space.f_frsize + stored)), 1 << 20)

    def check_process(self) -> None:
        """Raise ``Conflict`` in a forked child: two processes must not append to one extent."""
        if self.pid != os.getpid():
            raise Conflict(
                f"store {str(self.path)!r} was opened by process {self.pid} and cannot be used in its fork "
                f"{os.getpid()}: serve it and connect from both"
            )

    def release(self) -> None:
        """Let another process own it."""
        os.close(self.descriptor)


def claim_memory(memory_dir: Path, data_dir: Path) -> None:
    """Note in a memory directory whose it is. One inside its data directory needs no note.

    Raises:
        StoreInUse: it belongs to another store, whose live extents would be taken for a dead one's.
    """
    if memory_dir.absolute().is_relative_to(data_dir.absolute()):
        return
    note = memory_dir / OWNER_NOTE
    if note.exists():
        owner = Path(note.read_text())
        if owner.exists() and not (data_dir.exists() and owner.samefile(data_dir)):
            raise StoreInUse(
                f"memory directory {str(memory_dir)!r} belongs to the store at {str(owner)!r}, "
                f"not to {str(data_dir)!r}",
                owner=str(owner),
            )
    memory_dir.mkdir(parents=True, exist_ok=True)
    note.write_text(str(data_dir.absolute()))


def _in_use(path: Path, descriptor: int) -> StoreInUse:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        owner = {}
    os.close(descriptor)
    pid, url = owner.get("pid"), owner.get("url")
    where = f"; connect to {url}" if url else ""
    return StoreInUse(f"store {str(path)!r} is in use by process {pid}{where}", pid=pid, url=url)


def _write_note(path: Path, content: dict[str, str]) -> None:
    part = path.with_suffix(".part")
    with part.open("w") as file:
        file.write(json.dumps(content))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
