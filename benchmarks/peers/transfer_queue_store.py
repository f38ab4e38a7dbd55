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

PARTITION = "bench"


class TransferQueueEnd:
    """A client of the controller."""

    def build(self, payload: Payload) -> object:
        columns = {name: _column(values) for name, values in payload.fields.items()}
        return TensorDict(columns, batch_size=payload.samples)

    def put(self, value: object) -> object:
        assert isinstance(value, TensorDict)
        prefix = uuid.uuid4().hex[:8]
        keys = [f"{prefix}-{index}" for index in range(value.batch_size[0])]
        transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=value)
        return {"prefix": prefix, "count": len(keys)}

    def get(self, reference: object, layers: range | None) -> object:
        return transfer_queue.kv_batch_get(keys=_keys(reference), partition_id=PARTITION)

    def rows(self, value: object) -> dict[str, object]:
        assert isinstance(value, TensorDict)
        return {str(name): [one.numpy() for one in value[name].unbind()] for name in value.keys()}  # noqa: SIM118

    def remove(self, reference: object) -> None:
        transfer_queue.kv_clear(keys=_keys(reference), partition_id=PARTITION)

    def close(self) -> None:
        ray.shutdown()


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
