"""Mooncake's structured objects over TCP: a master, a segment in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import mooncake
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import (
    MooncakeBundleTransfer,
    export_dataproto_ref,
    import_dataproto_ref,
)

from benchmarks.peers.payloads import Payload
from benchmarks.peers.ports import free_port
from benchmarks.peers.system import at_once

SEGMENT_BYTES = 6 << 30
BUFFER_BYTES = 1 << 30


class MooncakeEnd:
    """A client without a segment of its own: what it puts lives in the third process."""

    def __init__(self, address: str) -> None:
        self._store = MooncakeDistributedStore()
        _setup(self._store, address, 0)
        self._transfer = MooncakeBundleTransfer(self._store)

    def build(self, payload: Payload) -> object:
        if payload.unit != "trajectory":
            return payload.fields
        # Dicts of one sample: a value must be a sequence of samples here.
        return [{name: [value] for name, value in one.items()} for one in payload.each()]

    def put(self, value: object) -> object:
        if isinstance(value, list):
            return at_once(self._put, value)
        return self._put(value)

    def share(self, reference: object) -> object:
        if isinstance(reference, list):
            return [export_dataproto_ref(one) for one in reference]
        return export_dataproto_ref(reference)

    def receive(self, shared: object) -> object:
        if isinstance(shared, list):
            return [import_dataproto_ref(one) for one in shared]
        return import_dataproto_ref(shared)

    def get(self, reference: object, layers: range | None) -> object:
        if isinstance(reference, list):
            return at_once(self._get, reference)
        return self._get(reference)

    def rows(self, value: object) -> dict[str, object]:
        if isinstance(value, list):
            return {name: [one[name][0] for one in value] for name in value[0]}
        assert isinstance(value, dict)
        return {name: list(values) for name, values in value.items()}

    def remove(self, shared: object) -> None:
        received = self.receive(shared)
        for one in received if isinstance(received, list) else [received]:
            for stage in one.stage_refs.values():
                self._transfer.remove_bundle(stage)

    def _put(self, value: object) -> object:
        return self._transfer.put(value, type="dict")

    def _get(self, reference: object) -> object:
        return self._transfer.get(reference, type="dict")

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def servers() -> Iterator[str]:
    """The master, and a segment in this process."""
    port = free_port()
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    command = [binary, f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"127.0.0.1:{port}"
    time.sleep(2)
    segment = MooncakeDistributedStore()
    try:
        # This process lends its memory: neither the producer's nor the consumer's.
        _setup(segment, address, SEGMENT_BYTES)
        yield address
    finally:
        segment.close()
        master.kill()
        master.wait()


def join(address: str, role: str) -> MooncakeEnd:
    return MooncakeEnd(address)


def _setup(store: MooncakeDistributedStore, address: str, segment_bytes: int) -> None:
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", address)
    if code:
        raise RuntimeError(f"mooncake: setup gave {code}")
