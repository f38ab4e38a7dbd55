"""Refuses to keep SQLite where its locks and shared memory do not work."""

from __future__ import annotations

import re
from pathlib import Path

from arrow_tq_schemas.errors import Unsupported

NETWORK_TYPES = frozenset({"afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "ncpfs", "smb3", "smbfs"})
NETWORK_FAMILIES = ("nfs", "fuse.")
MOUNTS = Path("/proc/mounts")


def refuse_network_filesystem(path: Path, mounts: Path = MOUNTS) -> None:
    """Raise ``Unsupported`` where ``path`` is on a network or fuse filesystem; names it and its mount.

    Locks and shared memory between processes, which a write-ahead log needs, are not reliable there.
    Where there is no ``/proc/mounts`` nothing is known and nothing refused.
    """
    if not mounts.exists():
        return
    place = path.absolute().parent.resolve()
    best: tuple[Path, str] | None = None
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = Path(_unescape(parts[1]))
        # Of two mounts on one point the later one is what is seen.
        if place.is_relative_to(point) and (best is None or len(point.parts) >= len(best[0].parts)):
            best = point, parts[2]
    if best is not None and _is_network(best[1]):
        raise Unsupported(
            f"catalog {str(path)!r} is on a {best[1]} filesystem mounted at {str(best[0])!r}: "
            "SQLite needs a local disk; give a data directory on one",
            path=str(path),
            filesystem=best[1],
        )


def _is_network(kind: str) -> bool:
    return kind in NETWORK_TYPES or kind.startswith(NETWORK_FAMILIES)


def _unescape(text: str) -> str:
    """Mount points have blanks and backslashes as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
