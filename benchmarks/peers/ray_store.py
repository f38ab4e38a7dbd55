"""Ray's object store as Miles and slime use it: boxed in one process, ``ray.get`` in another."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import ray

from benchmarks.peers.payloads import Payload
from benchmarks.peers.system import at_once

OBJECT_STORE_BYTES = 6 << 30
NAMESPACE, MAILBOX = "bench", "mailbox"


@dataclass(frozen=True, slots=True)
class Box:
    """What is put around references, so that Ray does not fetch them for whoever carries them."""

    inner: list[ray.ObjectRef]
    whole: bool


@ray.remote(num_cpus=0)
class Mailbox:
    """Carries boxes between two drivers; a reference that is pickled by hand is never freed."""

    def __init__(self) -> None:
        self._boxes: dict[str, Box] = {}

    def leave(self, key: str, box: Box) -> None:
        self._boxes[key] = box

    def look(self, key: str) -> Box:
        return self._boxes[key]

    def drop(self, key: str) -> None:
        self._boxes.pop(key, None)


class RayEnd:
    """A driver of its own on the same cluster."""

    def __init__(self) -> None:
        self._mailbox = ray.get_actor(MAILBOX)

    def build(self, payload: Payload) -> object:
        return payload.each() if payload.unit == "trajectory" else payload.fields

    def put(self, value: object) -> object:
        if isinstance(value, list):
            return Box(at_once(ray.put, value), whole=False)
        return Box([ray.put(value)], whole=True)

    def share(self, reference: object) -> object:
        key = uuid.uuid4().hex
        ray.get(self._mailbox.leave.remote(key, reference))
        return key

    def receive(self, shared: object) -> object:
        return ray.get(self._mailbox.look.remote(shared))

    def get(self, reference: object, layers: range | None) -> object:
        assert isinstance(reference, Box)
        return ray.get(reference.inner[0] if reference.whole else reference.inner)

    def rows(self, value: object) -> dict[str, object]:
        if isinstance(value, list):
            return {name: [one[name] for one in value] for name in value[0]}
        assert isinstance(value, dict)
        return value

    def remove(self, shared: object) -> None:
        ray.get(self._mailbox.drop.remote(shared))

    def close(self) -> None:
        ray.shutdown()


@contextlib.contextmanager
def servers() -> Iterator[str]:
    """A head node, and the mailbox."""
    context = ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        namespace=NAMESPACE,
    )
    try:
        mailbox = Mailbox.options(name=MAILBOX).remote()
        ray.get(mailbox.drop.remote(""))
        yield context.address_info["address"]
    finally:
        ray.shutdown()


def join(address: str, role: str) -> RayEnd:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace=NAMESPACE)
    return RayEnd()
