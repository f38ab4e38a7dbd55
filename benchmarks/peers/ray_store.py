"""Ray's object store, as Miles and slime use it: the dict put whole, its reference boxed."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator

import ray

from benchmarks.peers.payloads import Payload

OBJECT_STORE_BYTES = 6 << 30


class RayEnd:
    """A driver of its own on the same cluster."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def build(self, payload: Payload) -> object:
        return payload.fields

    def put(self, value: object) -> object:
        reference = ray.put(value)
        # The owner's own reference keeps the object; the box is what travels.
        self._kept = [reference]
        return base64.b64encode(ray.cloudpickle.dumps(reference)).decode()

    def get(self, reference: object, layers: range | None) -> object:
        return ray.get(ray.cloudpickle.loads(base64.b64decode(str(reference))))

    def rows(self, value: object) -> dict[str, object]:
        assert isinstance(value, dict)
        return value

    def remove(self, reference: object) -> None:
        self._kept = []

    def close(self) -> None:
        ray.shutdown()


@contextlib.contextmanager
def servers() -> Iterator[str]:
    """A head node."""
    context = ray.init(
        num_cpus=8, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False
    )
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()


def join(address: str, role: str) -> RayEnd:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    return RayEnd()
