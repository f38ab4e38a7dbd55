"""TransferQueue with its SimpleStorage on Ray: ragged fields as jagged nested tensors."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benchmarks.peers.payloads import Payload
from benchmarks.peers.system import at_once

PARTITION = "bench"


class TransferQueueEnd:
    """A client of the controller."""

    def build(self, payload: Payload) -> object:
        if payload.unit == "trajectory":
            return [{name: torch.from_numpy(one[name]) for name in one} for one in payload.each()]
        columns = {name: _column(values) for name, values in payload.fields.items()}
        return TensorDict(columns, batch_size=payload.samples)

    def put(self, value: object) -> object:
        prefix = uuid.uuid4().hex[:8]
        if isinstance(value, list):
            at_once(lambda index: _put(f"{prefix}-{index}", value[index]), range(len(value)))
            return {"prefix": prefix, "count": len(value)}
        assert isinstance(value, TensorDict)
        keys = [f"{prefix}-{index}" for index in range(value.batch_size[0])]
        transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=value)
        return {"prefix": prefix, "count": len(keys)}

    def share(self, reference: object) -> object:
        return reference

    def receive(self, shared: object) -> object:
        return shared

    def get(self, reference: object, layers: range | None) -> object:
        return transfer_queue.kv_batch_get(keys=_keys(reference), partition_id=PARTITION)

    def rows(self, value: object) -> dict[str, object]:
        assert isinstance(value, TensorDict)
        return {str(name): [one.numpy() for one in value[name].unbind()] for name in value.keys()}  # noqa: SIM118

    def remove(self, shared: object) -> None:
        transfer_queue.kv_clear(keys=_keys(shared), partition_id=PARTITION)

    def close(self) -> None:
        ray.shutdown()


def _put(key: str, fields: dict[str, torch.Tensor]) -> None:
    transfer_queue.kv_put(key=key, partition_id=PARTITION, fields=fields)


def _keys(reference: Any) -> list[str]:
    return [f"{reference['prefix']}-{index}" for index in range(reference["count"])]


def _column(values: list[Any]) -> torch.Tensor:
    first = values[0]
    if isinstance(first, (int, float)):
        return torch.tensor(values, dtype=torch.float64 if isinstance(first, float) else torch.int64)
    tensors = [torch.from_numpy(np.asarray(one)) for one in values]
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


@contextlib.contextmanager
def servers() -> Iterator[str]:
    """A head node with the controller and two storage units."""
    context = ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    try:
        yield context.address_info["address"]
    finally:
        transfer_queue.close()
        ray.shutdown()


def join(address: str, role: str) -> TransferQueueEnd:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    transfer_queue.init()
    return TransferQueueEnd()
