"""Checkpoints of the catalog's log run beside commits, which may checkpoint too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from arrow_tq.store.catalog.config import CatalogConfig
from arrow_tq.store.catalog.database import checkpoint, open_checkpointer, open_writer

# SQLite's WAL_CKPT_LOCK: byte 1 of the eight that begin at 120 of the -shm file (sqlite.org/walformat.html).
HOLD_THE_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, 121)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_checkpoint_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    writer = open_writer(CatalogConfig(path=path))
    checkpointer = open_checkpointer(path)
    checkpoint(checkpointer)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, f"{path}-shm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        checkpoint(checkpointer)
    finally:
        holder.communicate()
    checkpoint(checkpointer)
    checkpointer.close()
    writer.close()
