"""Stand for slime's and Miles's replay queues and slime's ``Sample``: same names, same states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch


class RoutingReplay:
    """slime's: takes tensors, or objects that materialise when they are read."""

    all_routing_replays: ClassVar[list[RoutingReplay]] = []
    lazy_resources: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.clear()
        RoutingReplay.all_routing_replays.append(self)

    def record(self, top_indices: Any) -> None:
        if not hasattr(top_indices, "materialize_for_routing_replay"):
            top_indices = top_indices.clone()
        self.top_indices_list.append(top_indices)

    def pop_forward(self) -> torch.Tensor:
        self.forward_index += 1
        return self._materialized(self.forward_index - 1, "forward")

    def pop_backward(self) -> torch.Tensor:
        self.backward_index += 1
        return self._materialized(self.backward_index - 1, "backward")

    def clear(self) -> None:
        self.forward_index = self.backward_index = 0
        self.top_indices_list: list[Any] = []

    def clear_forward(self) -> None:
        self.forward_index = 0

    def _materialized(self, index: int, stage: str) -> torch.Tensor:
        found = self.top_indices_list[index]
        if hasattr(found, "materialize_for_routing_replay"):
            made = found.materialize_for_routing_replay(stage)
            assert isinstance(made, torch.Tensor)
            return made
        return torch.as_tensor(found, dtype=torch.int32)

    @classmethod
    def register_lazy_resource(cls, resource: Any) -> None:
        cls.lazy_resources.append(resource)

    @classmethod
    def begin_lazy_pass(cls, release_stage: str) -> None:
        for resource in cls.lazy_resources:
            resource.begin_pass(release_stage)

    @classmethod
    def clear_all(cls) -> None:
        for replay in cls.all_routing_replays:
            replay.clear()
        for resource in cls.lazy_resources:
            resource.close()
        cls.lazy_resources.clear()


class Replay:
    """Miles's: copies tensors when they are recorded, moves them to the device when they are read."""

    def __init__(self) -> None:
        self.forward_index = self.backward_index = 0
        self.top_indices_list: list[Any] = []

    def record(self, top_indices: torch.Tensor) -> None:
        self.top_indices_list.append(torch.empty_like(top_indices).copy_(top_indices))

    def pop_forward(self) -> torch.Tensor:
        self.forward_index += 1
        made = self.top_indices_list[self.forward_index - 1].to("cpu")
        assert isinstance(made, torch.Tensor)
        return made


@dataclass
class Sample:
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    weight_versions: list[str] = field(default_factory=list)
