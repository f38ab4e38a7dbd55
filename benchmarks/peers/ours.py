"""arrow-tq through a server process: dicts as bundles, trajectories as sessions and a claim."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

import arrow_tq
from arrow_tq import Field, fields
from arrow_tq.interface import Store
from arrow_tq.trainer.batch import Batch
from arrow_tq.trainer.data import Data
from benchmarks import servers as processes
from benchmarks.peers.payloads import Payload

COMMITTED_TOGETHER = 64
"""Sessions written at a time, as so many rollouts that finish in the same moment."""


class ArrowTQEnd:
    """A client."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batches: dict[str, Batch] = {}

    def build(self, payload: Payload) -> object:
        return payload

    def put(self, value: object) -> object:
        assert isinstance(value, Payload)
        if "token_ids" not in value.fields:
            return {"bundle": self._store.put_bundle(value.fields)}
        return {"run": self._put_sessions(value)}

    def get(self, reference: Any, layers: range | None) -> object:
        if "bundle" in reference:
            return self._store.get_bundle(reference["bundle"])
        run = self._store.run(reference["run"])
        batch = self._batches.get(run.name) or run.claim(1 << 20)
        self._batches[run.name] = batch
        heavy = next(name for name in run.fields if name != "token_ids")
        return batch.fetch(["token_ids", heavy], layers=layers)

    def rows(self, value: object) -> dict[str, object]:
        if isinstance(value, Data):
            return {name: list(value[name]) for name in value}
        assert isinstance(value, dict)
        return value

    def remove(self, reference: Any) -> None:
        if "bundle" in reference:
            self._store.delete_bundle(reference["bundle"])
        elif (batch := self._batches.pop(reference["run"], None)) is not None:
            batch.release()

    def close(self) -> None:
        self._store.close()

    def _put_sessions(self, payload: Payload) -> str:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        heavy = next(one for one in payload.fields if one != "token_ids")
        run = self._store.run(name, fields=[fields.token_ids(), _field(heavy, payload)])
        sessions = [run.session(f"s-{index}") for index in range(payload.samples)]
        for session, ids, rows in zip(
            sessions, payload.fields["token_ids"], payload.fields[heavy], strict=True
        ):
            with session.step() as step:
                step.put("token_ids", ids, start=0)
                step.put(heavy, rows, start=0)
            session.finalize()
        return name


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


def accepts(payload: str) -> str | None:
    return None
