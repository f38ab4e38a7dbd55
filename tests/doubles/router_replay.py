"""Stands in for ``megatron.core.transformer.moe.router_replay`` where megatron-core is not installed.

Same names, same states, same order of effects; written anew from the behaviour of the public class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar

import torch

Choice = tuple[torch.Tensor, torch.Tensor]


class RouterReplayAction(Enum):
    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class RouterReplay:
    global_router_replay_instances: ClassVar[list[RouterReplay]] = []

    def __init__(self) -> None:
        self.target_topk_idx: torch.Tensor | None = None
        self.recorded_topk_idx: torch.Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[torch.Tensor] = []
        RouterReplay.global_router_replay_instances.append(self)

    @staticmethod
    def set_replay_data(all_layers_topk_indices: Sequence[torch.Tensor]) -> None:
        instances = RouterReplay.global_router_replay_instances
        if len(all_layers_topk_indices) != len(instances):
            raise ValueError(f"{len(all_layers_topk_indices)} tensors for {len(instances)} instances")
        for instance, target in zip(instances, all_layers_topk_indices, strict=True):
            instance.set_target_indices(target)

    def set_target_indices(self, topk_indices: torch.Tensor) -> None:
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def clear_indices(self) -> None:
        self.recorded_topk_idx = self.target_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        self.router_replay_action = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        action: Any = self.router_replay_action
        if action is RouterReplayAction.REPLAY_FORWARD:
            assert self.target_topk_idx is not None
            chosen = self.target_topk_idx
        elif action is RouterReplayAction.REPLAY_BACKWARD:
            chosen = self.replay_backward_list.pop(0)
        else:
            assert default_compute_topk is not None
            values, indices = default_compute_topk(scores, topk, num_groups, group_topk)
            if action is RouterReplayAction.RECORD:
                self.recorded_topk_idx = indices
            return values, indices
        on_device = chosen.to(scores.device)
        return scores.gather(1, on_device), on_device
