"""A server's own memory directory: named after its data directory, and swept once that is gone."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from arrow_tq.store.directory import NOTE_NAME, OWNER_NOTE

SHARED_MEMORY = Path("/dev/shm")


def default_memory_dir(data_dir: Path, root: Path = SHARED_MEMORY) -> Path | None:
    """Where the memory tier goes when nobody says; None keeps what the store has already."""
    if (data_dir / NOTE_NAME).exists() or not os.access(root, os.W_OK):
        return None
    name = str(data_dir.absolute())
    directory = root / f"arrow-tq-{os.getuid()}" / hashlib.sha256(name.encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    (directory / OWNER_NOTE).write_text(name)
    return directory


def sweep(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove memory directories of ours whose data directory no longer exists; returns them."""
    gone = []
    for note in (root / f"arrow-tq-{os.getuid()}").glob(f"*/{OWNER_NOTE}"):
        if not Path(note.read_text()).exists():
            shutil.rmtree(note.parent, ignore_errors=True)
            gone.append(note.parent)
    return gone
