"""A producer or a consumer: one process that does what it is told by JSON lines, and times it.

``python -m benchmarks.peers.worker SYSTEM ROLE ADDRESS``
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO, TypeVar

import numpy as np

from benchmarks.peers.payloads import Payload, cut, difference, recipe
from benchmarks.peers.system import SYSTEMS, Endpoint, load

T = TypeVar("T")


class Worker:
    """Answers requests: ``put``, ``get``, ``remove``."""

    def __init__(self, endpoint: Endpoint, layers: bool) -> None:
        self._endpoint = endpoint
        self._layers = layers
        """Whether it can be asked for some layers alone."""
        self._payload: Payload | None = None

    def answer(self, request: dict[str, object]) -> dict[str, object]:
        """One request's reply; ``error`` where it failed."""
        verb = str(request["do"])
        if verb == "prepare":
            self._payload = None
            gc.collect()
            name = str(request["payload"])
            self._payload = recipe(name).make(name, int(str(request["samples"])))
            return {"nbytes": self._payload.nbytes}
        if verb == "put":
            return self._put()
        if verb == "get":
            return self._get(request)
        self._endpoint.remove(request["reference"])
        return {}

    def _put(self) -> dict[str, object]:
        assert self._payload is not None
        payload = self._payload
        value, build_s = timed(lambda: self._endpoint.build(payload))
        reference, put_s = timed(lambda: self._endpoint.put(value))
        return {"reference": self._endpoint.share(reference), "build_s": build_s, "put_s": put_s}

    def _get(self, request: dict[str, object]) -> dict[str, object]:
        assert self._payload is not None
        part = self._payload.part
        reference = self._endpoint.receive(request["reference"])
        value, get_s = timed(lambda: self._endpoint.get(reference, part if self._layers else None))
        rows, rows_s = timed(lambda: self._rows(value))
        return {"get_s": get_s, "rows_s": rows_s, "wrong": difference(self._payload, rows)}

    def _rows(self, value: object) -> dict[str, object]:
        """Rows; of a system that has given all layers those that were wanted."""
        rows = self._endpoint.rows(value)
        if self._payload is None or self._payload.part is None or self._layers:
            return rows
        layers = self._payload.part
        return {name: [cut(np.asarray(one), layers) for one in values] for name, values in rows.items()}  # type: ignore[attr-defined]


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and how long it took; the collector runs as for users, over what is new alone."""
    gc.collect()
    gc.freeze()
    try:
        started = time.perf_counter()
        result = work()
        return result, time.perf_counter() - started
    finally:
        gc.unfreeze()


def main() -> None:
    system, role, address = sys.argv[1:4]
    replies = _own_stdout()
    with contextlib.closing(load(system).join(address, role)) as endpoint:
        worker = Worker(endpoint, SYSTEMS[system].layers)
        print(json.dumps({"ready": True}), file=replies, flush=True)
        for line in sys.stdin:
            try:
                reply = worker.answer(json.loads(line))
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(json.dumps(reply), file=replies, flush=True)


def _own_stdout() -> TextIO:
    """Where replies go; whatever the system prints goes to stderr instead."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


if __name__ == "__main__":
    main()
