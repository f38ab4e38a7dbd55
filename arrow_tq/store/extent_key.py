"""What an extent is of, and where its files are.

::

    <root>/extents/<run>/<field>.<group>/<number>.arrows     root: the tier's directory
    <data_dir>/sidecars/<tier>/<run>/<field>.<group>/<number>.idx, and schema.ipc
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Tier = Literal["memory", "disk"]
TIERS: tuple[Tier, ...] = ("memory", "disk")
EXTENT_SUFFIX = ".arrows"
SIDECAR_SUFFIX = ".idx"
ADOPTED_SUFFIX = ".adopted"


@dataclass(frozen=True, slots=True)
class ExtentKey:
    """The chunks that share extents: of one run, field, layer group and tier."""

    run: str
    field: str
    group: int
    tier: Tier

    @property
    def folder(self) -> Path:
        return Path(self.run) / f"{self.field}.{self.group}"


@dataclass(frozen=True, slots=True)
class Roots:
    """The directories of a shard."""

    data_dir: Path
    memory_dir: Path

    def extents(self, tier: Tier) -> Path:
        return (self.data_dir if tier == "disk" else self.memory_dir) / "extents"

    def extent(self, key: ExtentKey, number: int) -> Path:
        return self.extents(key.tier) / key.folder / f"{number:06d}{EXTENT_SUFFIX}"

    def sidecar(self, key: ExtentKey, number: int) -> Path:
        return self.sidecars(key) / f"{number:06d}{SIDECAR_SUFFIX}"

    def adopted(self, key: ExtentKey, number: int) -> Path:
        """Log of the chunks of a client's extent that were adopted."""
        return self.sidecars(key) / f"{number:06d}{ADOPTED_SUFFIX}"

    def sidecars(self, key: ExtentKey) -> Path:
        """Folder of a key's sidecars and of the copy of its schema."""
        return self.data_dir / "sidecars" / key.tier / key.folder

    def existing(self, tier: Tier) -> Iterator[tuple[ExtentKey, int, Path]]:
        """Every extent file of a tier, in order of its number."""
        for path in sorted(self.extents(tier).glob(f"*/*/*{EXTENT_SUFFIX}")):
            key = _key(path.parent, tier)
            if path.stem.isdigit() and key is not None:
                yield key, int(path.stem), path

    def keys(self, tier: Tier) -> Iterator[ExtentKey]:
        """Every key that has a folder of extents or of sidecars."""
        for root in (self.extents(tier), self.data_dir / "sidecars" / tier):
            for folder in root.glob("*/*/"):
                key = _key(folder, tier)
                if key is not None:
                    yield key


def _key(folder: Path, tier: Tier) -> ExtentKey | None:
    """The key whose folder this is."""
    field, _, group = folder.name.rpartition(".")
    return ExtentKey(folder.parent.name, field, int(group), tier) if group.isdigit() and field else None


def write_whole(path: Path, content: bytes, durable: bool) -> None:
    """Write a small file, whole or not at all; ``durable``: on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path, root: Path) -> None:
    """Make the names durable from a folder up to ``root``, both included."""
    sync_folder(folder)
    while folder != root and folder != folder.parent:
        folder = folder.parent
        sync_folder(folder)
