"""What a server tells clients of its own machine: where chunks lie, so that they map them."""

from __future__ import annotations

import hmac
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from arrow_tq.store.extent import Entry, Extent
from arrow_tq.store.extent_key import ExtentKey
from arrow_tq.store.grants import Grants
from arrow_tq.store.reading import Reader
from arrow_tq_schemas.commands import (
    AdoptChunks,
    ChunkLocations,
    ChunkVerdicts,
    Command,
    Done,
    EndGrants,
    ExtentPlace,
    FindHost,
    GrantExtent,
    GrantsKept,
    HostInfo,
    KeepGrants,
    LocateChunks,
    Reply,
    RunInfo,
)
from arrow_tq_schemas.errors import InvalidInput, NotFound, Unsupported
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.locations import LOCATION_DTYPE, Locations, unpack_ids

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROOF_NAME = "host.proof"


HOST_COMMANDS = (FindHost, LocateChunks, GrantExtent, AdoptChunks, KeepGrants, EndGrants)


class Runs(Protocol):
    """What is declared."""

    def field(self, run: str, name: str) -> Field:
        """Raises ``NotFound``."""

    def run_info(self, run: str, epoch: int = 0) -> RunInfo:
        """As new as ``epoch``, where there is one; raises ``NotFound``."""


class HostShare:
    """Proves to clients that they share this machine, and tells them places of chunks. Thread-safe.

    Trust is that of the file system: whoever may read the proof may read the extents.

    Args:
        memory_dir: where the extents are, and the proof.
        runs: who knows what is declared.
        number: the shard whose chunks these are; None: it has none, or none yet.
        host: what the server says its machine is; None: as the kernel names it.
    """

    def __init__(
        self,
        memory_dir: Path,
        reader: Reader,
        grants: Grants,
        runs: Runs,
        number: Callable[[], int | None],
        host: str | None = None,
    ) -> None:
        self._number = number
        self._host = host
        self._path = memory_dir.absolute() / PROOF_NAME
        self._reader = reader
        self._grants = grants
        self._runs = runs
        self._lock = threading.Lock()
        self._proof: str | None = None
        self.chunks_located = 0
        self.bytes_located = 0

    def execute(self, command: Command) -> Reply:
        """Answer one of ``HOST_COMMANDS``."""
        if isinstance(command, FindHost):
            return self.find(command)
        if isinstance(command, LocateChunks):
            return self.locate(command)
        if isinstance(command, GrantExtent):
            return self.grant(command)
        if isinstance(command, AdoptChunks):
            self.check(command.proof)
            field, number = self._runs.field(command.run, command.field), self._shard_number()
            errors = self._grants.adopt(
                command, field, lambda epoch: self._runs.run_info(command.run, epoch), number
            )
            return Reply(body=ChunkVerdicts(errors=errors))
        if isinstance(command, KeepGrants):
            self.check(command.proof)
            return Reply(body=GrantsKept(grants=self._grants.keep(command.grants)))
        assert isinstance(command, EndGrants)
        self.check(command.proof)
        return Reply(body=Done(count=self._grants.end(command.grants)))

    def grant(self, command: GrantExtent) -> Reply:
        """A file for a client to write to.

        Raises:
            Unsupported: chunks of this run are to survive power loss, and nobody may say so before they do;
                or this server holds no chunks.
            StoreFull: too full to give room away.
        """
        self.check(command.proof)
        self._shard_number()
        field = self._runs.field(command.run, command.field)
        if command.group >= len(field.groups):
            raise InvalidInput(
                f"field {field.name!r}: layer group {command.group}, it has {len(field.groups)}"
            )
        if self._runs.run_info(command.run).durability == "disk":
            raise Unsupported(
                f"run {command.run!r} is on disk: its chunks are sent, and synced before their ack"
            )
        key = ExtentKey(command.run, command.field, command.group, "memory")
        return Reply(body=self._grants.grant(field, key, command.size_bytes))

    def find(self, command: FindHost) -> Reply:
        """Write the proof when the first client asks: a store that is not served has none."""
        with self._lock:
            if self._proof is None:
                self._proof = self._write()
        boot_id = self._host
        if boot_id is None:
            boot_id = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
        return Reply(body=HostInfo(boot_id=boot_id, proof_path=str(self._path)))

    def check(self, proof: str) -> None:
        """Raise ``NotFound`` for a proof that is not this process's."""
        if self._proof is None or not hmac.compare_digest(proof.encode(), self._proof.encode()):
            raise NotFound("same host: not this server's proof; find the host again", what="host_proof")

    def locate(self, command: LocateChunks) -> Reply:
        """Places of committed chunks; raises what a read of them would."""
        self.check(command.proof)
        entries = self._reader.locate(command.run, command.field, unpack_ids(command.chunk_ids))
        extents: dict[Extent, int] = {}
        rows: Locations = np.empty(len(entries), LOCATION_DTYPE)
        for index, entry in enumerate(entries):
            number = extents.setdefault(entry.extent, len(extents))
            rows[index] = _location(number, entry)
        places = [ExtentPlace(token=one.token, path=str(one.file.path.absolute())) for one in extents]
        self.chunks_located += len(entries)
        self.bytes_located += int(rows["length"].sum())
        return Reply(body=ChunkLocations(extents=places), blobs=[rows.tobytes()])

    def close(self) -> None:
        """The proof goes with the process that wrote it."""
        with self._lock:
            if self._proof is not None:
                self._path.unlink(missing_ok=True)
                self._proof = None

    def counters(self) -> dict[str, float]:
        """What went around the wire, by name."""
        return {
            "chunks_located_total": self.chunks_located,
            "bytes_located_total": self.bytes_located,
            "grants": len(self._grants),
            "chunks_adopted_total": self._grants.chunks_adopted,
            "bytes_adopted_total": self._grants.bytes_adopted,
        }

    def _shard_number(self) -> int:
        number = self._number()
        if number is None:
            raise Unsupported("put: this server is a catalog; chunks go to its shards (their map: cluster)")
        return number

    def _write(self) -> str:
        proof = secrets.token_hex(16)
        self._path.unlink(missing_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, proof.encode())
        finally:
            os.close(descriptor)
        return proof


def _location(extent: int, entry: Entry) -> tuple[int, int, int, int, int, int, bytes, bool]:
    return (
        *(extent, entry.rows, entry.offset, entry.length, entry.start, entry.epoch),
        *(bytes.fromhex(entry.checksum), entry.nullable),
    )
