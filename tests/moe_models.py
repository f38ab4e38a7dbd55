"""Model chunks with routers as Megatron builds them, small enough for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 8


class Router(nn.Module):
    """Chooses by its replay; keeps what it chose, read by read."""

    def __init__(self, number: int, replay: object, experts: int, topk: int, attribute: str) -> None:
        super().__init__()
        self.layer_number = number
        self.weight = nn.Parameter(torch.randn(experts, HIDDEN))
        self.topk = topk
        self.attribute = attribute
        setattr(self, attribute, replay)
        self.chosen: list[torch.Tensor] = []

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scores = states.reshape(-1, HIDDEN) @ self.weight.T
        replay = getattr(self, self.attribute)
        values, indices = replay.get_replay_topk(scores, self.topk, None, None, plain_topk)
        self.chosen.append(indices.detach().clone())
        return values.sum(dim=1)


def plain_topk(
    scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(scores, k=topk, dim=1)
    return values, indices


class Layer(nn.Module):
    def __init__(self, router: Router | None) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.router = router

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + torch.tanh(self.dense(states))
        if self.router is None:
            return states
        return states * self.router(states)[:, None].sigmoid()


class MultiTokenPredictionLayer(nn.Module):
    def __init__(self, router: Router) -> None:
        super().__init__()
        self.transformer_layer = Layer(router)


class Chunk(nn.Module):
    """One model chunk: some layers of the whole model, and perhaps layers that predict further tokens."""

    def __init__(
        self,
        layers: Sequence[int],
        dense: Sequence[int],
        make_replay: Callable[[], object],
        experts: int,
        topk: int,
        attribute: str = "router_replay",
        prediction: Sequence[int] = (),
    ) -> None:
        super().__init__()

        def router(layer: int) -> Router:
            return Router(layer + 1, make_replay(), experts, topk, attribute)

        self.mtp = nn.ModuleList(MultiTokenPredictionLayer(router(layer)) for layer in prediction)
        self.layers = nn.ModuleList(Layer(None if layer in dense else router(layer)) for layer in layers)

    def forward(self, states: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        for layer in self.layers:
            states = checkpoint(layer, states, use_reentrant=False) if recompute else layer(states)
        return states

    def routers(self) -> dict[int, Router]:
        found = [
            layer.router for layer in self.layers if isinstance(layer, Layer) and layer.router is not None
        ]
        return {router.layer_number - 1: router for router in found}
