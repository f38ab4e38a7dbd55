"""Start-up: takes over the extents that an earlier process left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from arrow_tq.layout.messages import END_OF_STREAM
from arrow_tq.logs import logger
from arrow_tq.store import adopted, extent_schema, sidecar
from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.extent_key import TIERS, ExtentKey, Roots, Tier
from arrow_tq.store.granted_file import GrantedFile
from arrow_tq.store.mapped_file import PAGE, MappedFile
from arrow_tq.store.space import RunSpaces
from arrow_tq.store.walk import walk
from arrow_tq_schemas.ids import ChunkId

DAMAGED_SUFFIX = ".damaged"
"""Of an extent that cannot be read at all: set aside, its bytes no longer counted."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What start-up found."""

    extents: int = 0
    chunks: int = 0
    walked: int = 0
    """Extents without a good sidecar."""
    set_aside: int = 0
    """Extents whose schema is nowhere to be read."""
    seconds: float = 0.0
    lost_chunks: int = 0
    """Chunks that a step attached and nobody released, and that are not here; a layer group each. Known once
    the catalog was asked (``Upkeep.reconcile``)."""
    lost_bytes: int = 0
    """Payload of these."""


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """One extent with its chunks, sealed."""

    extent: Extent
    located: list[tuple[ChunkId, Entry]]
    walked: bool


class Recovery:
    """Opens every extent of a shard: by its sidecar, or by walking it. What it walked it seals."""

    def __init__(self, roots: Roots, spaces: RunSpaces) -> None:
        self._roots = roots
        self._spaces = spaces
        self._log = logger("arrow_tq.recovery")
        self._set_aside = 0
        self.report = RecoveryReport()

    def extents(self) -> Iterator[Recovered]:
        """The extents that hold chunks. Those that hold none are deleted, like sidecars without one."""
        started = time.monotonic()
        extents = chunks = walked = 0
        for tier in TIERS:
            expected = set()
            for key, number, path in self._roots.existing(tier):
                recovered = self._open(key, number, path)
                if recovered is None:
                    continue
                expected.add(self._roots.sidecar(key, number))
                expected.add(self._roots.adopted(key, number))
                extents += 1
                chunks += len(recovered.located)
                walked += recovered.walked
                yield recovered
            self._sweep_sidecars(tier, expected)
        self.report = RecoveryReport(extents, chunks, walked, self._set_aside, time.monotonic() - started)
        if extents:
            self._log.info("extents recovered", extents=extents, chunks=chunks, walked=walked)

    def _open(self, key: ExtentKey, number: int, path: Path) -> Recovered | None:
        if path.stat().st_size == 0:
            path.unlink()
            return None
        log = self._roots.adopted(key, number)
        if log.exists():
            return self._open_granted(key, number, path, log)
        file = MappedFile.open(path, self._spaces.of(key.run))
        side = self._roots.sidecar(key, number)
        if file.data_end() == 0:
            self._delete(file, side)
            return None
        schema = extent_schema.read(pa.py_buffer(file.map), key)
        if schema is None:
            schema = extent_schema.read_copy(self._roots.sidecars(key), key)
        if schema is None:
            self._put_aside(file)
            return None
        extent = Extent.reopen(key, number, file, schema)
        located = sidecar.read(side, extent)
        walked = located is None
        if located is None:
            located = walk(extent)
            if located:
                self._seal(extent)
                sidecar.write(side, extent, located)
        if not located:
            self._delete(file, side)
            return None
        extent.chunks = len(located)
        return Recovered(extent, located, walked)

    def _open_granted(self, key: ExtentKey, number: int, path: Path, log: Path) -> Recovered | None:
        """A file that a client wrote, and may still write: what is not in its log is nothing."""
        file = GrantedFile.open(path, self._spaces.of(key.run))
        schema = extent_schema.read_copy(self._roots.sidecars(key), key)
        if schema is None:
            self._put_aside(file)
            return None
        extent = Extent.reopen(key, number, file, schema)
        located = adopted.read(log, extent)
        if not located:
            self._delete(file, log)
            return None
        extent.used_bytes = max(entry.offset + entry.length for _, entry in located)
        extent.chunks = len(located)
        return Recovered(extent, located, walked=False)

    @staticmethod
    def _seal(extent: Extent) -> None:
        """End the stream after the last whole chunk, zero the torn rest of that page, free what follows."""
        end = extent.used_bytes + len(END_OF_STREAM)
        rest = min(-(-end // PAGE) * PAGE, extent.file.size_bytes) - extent.used_bytes
        extent.file.write(extent.used_bytes, END_OF_STREAM.ljust(max(rest, len(END_OF_STREAM)), b"\x00"))
        extent.file.shrink(end)
        if extent.key.tier == "disk":
            extent.file.sync()

    def _delete(self, file: MappedFile, side: Path) -> None:
        self._log.warning("extent without a whole chunk deleted", path=str(file.path))
        side.unlink(missing_ok=True)
        file.unmap()
        file.delete()

    def _put_aside(self, file: MappedFile) -> None:
        """Keep what somebody may still want to look at, out of the store's way."""
        file.move(file.path.with_suffix(file.path.suffix + DAMAGED_SUFFIX))
        self._log.error("extent without a readable schema set aside", path=str(file.path))
        file.unmap()
        file.forget()
        self._set_aside += 1

    def _sweep_sidecars(self, tier: Tier, expected: set[Path]) -> None:
        folder = self._roots.data_dir / "sidecars" / tier
        for path in folder.glob("*/*/*"):
            if path not in expected and path.name != extent_schema.COPY_NAME:
                path.unlink()
