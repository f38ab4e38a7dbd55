"""arrow-tq through a server process: dicts as bundles, trajectories as sessions and a claim."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import arrow_tq
from arrow_tq import Field, fields
from arrow_tq.interface import Store
from arrow_tq.trainer.batch import Batch
from arrow_tq.trainer.data import Data
from benchmarks import servers as processes
from benchmarks.peers.payloads import Payload
from benchmarks.peers.system import at_once

SAMPLES_A_SESSION = {"chunks-40000x64": 1_000}
"""One behind the other, each field's put as the list that they are; elsewhere a session a sample."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A batch's rows, and how many of them each sample of a session has, where it has several."""

    data: Data
    lengths: list[int] | None

    def rows(self) -> dict[str, object]:
        """One array a sample: views."""
        if self.lengths is None:
            return {name: list(self.data[name]) for name in self.data}
        return {name: list(self._cut(name, iter(self.lengths))) for name in self.data}

    def _cut(self, name: str, lengths: Iterator[int]) -> Iterator[object]:
        for segment in self.data[name]:
            first = 0
            while first < len(segment):
                end = first + next(lengths)
                yield segment[first:end]
                first = end


class ArrowTQEnd:
    """A client."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batches: dict[str, Batch] = {}

    def build(self, payload: Payload) -> object:
        return payload

    def put(self, value: object) -> object:
        assert isinstance(value, Payload)
        if value.unit == "batch":
            return {"bundle": self._store.put_bundle(value.fields)}
        return self._put_sessions(value)

    def share(self, reference: object) -> object:
        return reference

    def receive(self, shared: object) -> object:
        return shared

    def get(self, reference: Any, layers: range | None) -> object:
        if "bundle" in reference:
            return self._store.get_bundle(reference["bundle"])
        run = self._store.run(reference["run"])
        # What is ready is what this round put: a batch before it was released.
        batch = self._batches.get(reference["round"]) or run.claim(1 << 20, order_by="session_id")
        self._batches[reference["round"]] = batch
        heavy = next(name for name in run.fields if name != "token_ids")
        return Fetched(batch.fetch(["token_ids", heavy], layers=layers), reference["lengths"])

    def rows(self, value: object) -> dict[str, object]:
        if isinstance(value, Fetched):
            return value.rows()
        assert isinstance(value, dict)
        return value

    def remove(self, shared: Any) -> None:
        if "bundle" in shared:
            self._store.delete_bundle(shared["bundle"])
        elif (batch := self._batches.pop(shared["round"], None)) is not None:
            batch.release()

    def close(self) -> None:
        self._store.close()

    def _put_sessions(self, payload: Payload) -> dict[str, object]:
        # One run for all rounds, as a training has; its memory serves one batch after the other.
        turn = uuid.uuid4().hex[:8]
        heavy = next(one for one in payload.fields if one != "token_ids")
        run = self._store.run(payload.name, fields=[fields.token_ids(), _field(heavy, payload)])
        samples = list(zip(payload.fields["token_ids"], payload.fields[heavy], strict=True))
        together = SAMPLES_A_SESSION.get(payload.name, 1)

        def write(first: int) -> None:
            session = run.session(f"{turn}-{first:08}")
            ids, rows = zip(*samples[first : first + together], strict=True)
            with session.step() as step:
                step.put("token_ids", ids[0] if together == 1 else ids, start=0)
                step.put(heavy, rows[0] if together == 1 else rows, start=0)
            session.finalize()

        at_once(write, range(0, len(samples), together))
        lengths = None if together == 1 else [len(rows) for _, rows in samples]
        return {"run": run.name, "round": turn, "lengths": lengths}


def _field(name: str, payload: Payload) -> Field:
    first = np.asarray(payload.fields[name][0])
    layers, topk = first.shape[1:]
    if name == "routed_experts":
        # One row a token here, so that every system moves the same bytes.
        return Field(name, "uint8", (layers, topk), layer_axis=0, num_experts=256, domain="all")
    return Field(name, "int32", (layers, topk), layer_axis=0, domain="all", pad=-1)


@contextlib.contextmanager
def servers() -> Iterator[str]:
    """One server."""
    with processes.ours() as url:
        yield url


def join(address: str, role: str) -> ArrowTQEnd:
    return ArrowTQEnd(arrow_tq.connect(address))
