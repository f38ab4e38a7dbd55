"""Routing replay through Megatron-Core's ``RouterReplay``.

Megatron distributes replay data by the order in which routers were made, gathers with whatever ids it is
given, and appends every target to a queue that only recomputation empties. ``MegatronReplay`` binds to the
routers of the live model instead, checks what it hands them, and keeps the queues in step with the passes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, cast

from arrow_tq.adapters.replay.source import LayerRouting, MicroBatchRouting
from arrow_tq.adapters.replay.switch import Switch
from arrow_tq.adapters.routers import LiveRouter, live_routers
from arrow_tq_schemas.errors import Conflict, InvalidField, InvalidInput, Misaligned, ValueOutOfRange

if TYPE_CHECKING:
    import torch
    from torch import nn

ATTRIBUTE = "router_replay"


class Pass(Enum):
    """What reads routing in a forward, and so what becomes of the queue that it fills."""

    FORWARD_ONLY = "forward-only"
    """Old or reference log-probs: nothing reads it again."""
    TRAINING = "training"
    """Training without recomputation: backward does not read it either."""
    RECOMPUTED = "recomputed"
    """Training with recomputation: backward reads it once more, first in, first out."""


class RouterReplay(Protocol):
    """What is used of ``megatron.core.transformer.moe.router_replay.RouterReplay``."""

    replay_backward_list: list[torch.Tensor]
    router_replay_action: Enum | None

    def set_target_indices(self, topk_indices: torch.Tensor) -> None: ...
    def clear_indices(self) -> None: ...
    def set_router_replay_action(self, router_replay_action: Enum) -> None: ...
    def clear_router_replay_action(self) -> None: ...


class MegatronReplay:
    """Replays routing in the model chunks of one rank.

    With ``Switch.OFF`` or ``LOGPROBS`` it does nothing: no module is looked at, no hook is set.

    Attributes:
        routers: the live routers, by chunk and layer.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        num_experts: int,
        topk: int,
        switch: Switch = Switch.ROUTING,
    ) -> None:
        """
        Args:
            chunks: this rank's model chunks, one a virtual pipeline stage.
            num_experts, topk: of the model's routers; what is replayed is checked against them.
            switch: whether routing is replayed.

        Raises:
            InvalidInput: no router, or one that does not know its layer.
            Conflict: two live routers of one layer.
        """
        self.num_experts = num_experts
        self.topk = topk
        self.switch = switch
        self.routers = live_routers(chunks, ATTRIBUTE) if switch.has_routing else []
        self._expected: dict[int, int] = {}
        self._hooks = [
            router.module.register_forward_pre_hook(self._guard(router)) for router in self.routers
        ]
        self._queued: dict[int, int] = {router.layer_id: 0 for router in self.routers}

    def layer_ids(self, chunk: int | None = None) -> tuple[int, ...]:
        """Global ids of the MoE layers of one chunk, or of all: the ``layers`` to fetch."""
        return tuple(router.layer_id for router in self._of(chunk))

    @contextmanager
    def forward(
        self,
        routing: MicroBatchRouting | Mapping[int, torch.Tensor] | Mapping[int, LayerRouting],
        reads: Pass,
        chunk: int = 0,
    ) -> Iterator[None]:
        """Around one chunk's forward of one micro-batch: its routers choose what was recorded.

        Afterwards the routers of the chunk are ready for recomputation (``RECOMPUTED``), or as they were.

        Args:
            routing: by global layer id, ``[local rows, top-k]`` integers; layers of other ranks are ignored.
            reads: what else reads this routing.
            chunk: virtual pipeline stage.

        Raises:
            InvalidInput: a layer of the chunk has no routing.
            ValueOutOfRange: an id that is no expert of the model, or -1.
            Misaligned: a router sees another number of rows than were recorded for it.
        """
        if not self.switch.has_routing:
            yield
            return
        routers = self._of(chunk)
        targets = {router.layer_id: self._target(router, routing) for router in routers}
        for router in routers:
            target = targets[router.layer_id]
            replay = _replay(router)
            replay.set_target_indices(cast("torch.Tensor", target))
            replay.set_router_replay_action(_actions(router).REPLAY_FORWARD)
            self._expected[router.layer_id] = int(target.shape[0])
        try:
            yield
        finally:
            for router in routers:
                self._after_forward(router, reads)

    def finish(self) -> None:
        """A step is over: every queue must be empty. Call it after the last backward.

        Raises:
            Conflict: recomputation read less than was queued; names layer and counts. Queues are emptied.
        """
        left = {
            router.layer_id: len(_replay(router).replay_backward_list)
            for router in self.routers
            if _replay(router).replay_backward_list
        }
        queued = {layer: self._queued[layer] for layer in left}
        self.reset()
        if left:
            layer, count = next(iter(left.items()))
            raise Conflict(
                f"{len(left)} layers kept routing that no backward read, such as layer {layer}: {count} of "
                f"{queued[layer]} micro-batches; was Pass.RECOMPUTED meant?",
                layers=sorted(left),
            )

    def reset(self) -> None:
        """Routers choose for themselves again, and hold nothing."""
        for router in self.routers:
            replay = _replay(router)
            replay.clear_indices()
            replay.clear_router_replay_action()
            self._queued[router.layer_id] = 0
        self._expected.clear()

    def close(self) -> None:
        """Reset, and take the hooks off. Idempotent."""
        self.reset()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _of(self, chunk: int | None) -> list[LiveRouter]:
        return [router for router in self.routers if chunk is None or router.chunk == chunk]

    def _target(
        self,
        router: LiveRouter,
        routing: MicroBatchRouting | Mapping[int, torch.Tensor] | Mapping[int, LayerRouting],
    ) -> torch.Tensor | LayerRouting:
        layer = router.layer_id
        if isinstance(routing, MicroBatchRouting):
            return self._checked(layer, routing.source.read_layer(routing, layer, "forward", "int64"))
        if layer not in routing:
            raise InvalidInput(f"layer {layer} ({router.path!r}) has no routing; there is {sorted(routing)}")
        found = routing[layer]
        if not isinstance(found, LayerRouting):
            return self._checked(layer, found)
        # Its ids are checked against the field when they are fetched, so the field must be this model's.
        field = found.micro.source.batch.run.field(found.micro.source.field_name)
        if field.shape[1] != self.topk or (field.num_experts or 0) > self.num_experts:
            raise InvalidField(
                f"field {field.name!r} has top {field.shape[1]} of {field.num_experts} experts, the model "
                f"top {self.topk} of {self.num_experts}",
                field=field.name,
            )
        return found

    def _checked(self, layer: int, target: torch.Tensor) -> torch.Tensor:
        if target.ndim != 2 or target.shape[1] != self.topk or target.dtype.is_floating_point:
            raise InvalidField(
                f"layer {layer}: routing is {target.dtype}{list(target.shape)}, expected integers of "
                f"[local rows, {self.topk}]",
                layer=layer,
            )
        widened = target.long()
        if widened.numel():
            low, high = (int(edge) for edge in widened.aminmax())
            if low < 0 or high >= self.num_experts:
                value = low if low < 0 else high
                row = int((widened == value).any(dim=1).nonzero()[0])
                raise ValueOutOfRange(
                    f"layer {layer}, row {row}: expert {value}, expected 0 to {self.num_experts - 1}",
                    layer=layer,
                    row=row,
                    value=value,
                )
        return widened

    def _guard(self, router: LiveRouter) -> Any:
        """A gather with too few rows says nothing: compare before it is made."""
        layer, replay = router.layer_id, _replay(router)

        def guard(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            expected = self._expected.get(layer)
            if expected is None and replay.router_replay_action is _actions(router).REPLAY_BACKWARD:
                if not replay.replay_backward_list:
                    raise Conflict(f"layer {layer}: recomputation asks for routing that no forward queued")
                expected = int(replay.replay_backward_list[0].shape[0])
            if expected is None:
                return
            rows = inputs[0].numel() // inputs[0].shape[-1]
            if rows != expected:
                raise Misaligned(
                    f"layer {layer}: its router sees {rows} rows, routing was laid out for {expected}",
                    layer=layer,
                )

        return guard

    def _after_forward(self, router: LiveRouter, reads: Pass) -> None:
        replay = _replay(router)
        self._expected.pop(router.layer_id, None)
        if reads is Pass.RECOMPUTED:
            self._queued[router.layer_id] += 1
        else:
            # What this forward queued is the newest entry; older ones belong to backwards still to come.
            replay.replay_backward_list.pop()
        if replay.replay_backward_list:
            replay.set_router_replay_action(_actions(router).REPLAY_BACKWARD)
        else:
            replay.clear_indices()
            replay.clear_router_replay_action()


def replay_list(
    chunks: Sequence[nn.Module],
    routing: Mapping[int, torch.Tensor],
    instances: Sequence[object],
) -> list[torch.Tensor]:
    """The list that ``RouterReplay.set_replay_data`` takes, for code that calls it itself.

    Args:
        chunks: this rank's model chunks.
        routing: by global layer id.
        instances: ``RouterReplay.global_router_replay_instances``.

    Raises:
        InvalidInput: a layer has no routing.
        Conflict: instances that no live router of these chunks holds: the list cannot be made for them.
    """
    layer_of = {id(router.replay): router.layer_id for router in live_routers(chunks, ATTRIBUTE)}
    strangers = [place for place, instance in enumerate(instances) if id(instance) not in layer_of]
    if strangers:
        raise Conflict(
            f"router replay instances {strangers} of {len(instances)} belong to no decoder layer of this "
            "model (multi-token prediction, or a model that is gone): set targets on live routers instead",
            instances=strangers,
        )
    missing = sorted(set(layer_of.values()) - set(routing))
    if missing:
        raise InvalidInput(f"layers {missing} have no routing; there is {sorted(routing)}")
    return [routing[layer_of[id(instance)]] for instance in instances]


def _replay(router: LiveRouter) -> RouterReplay:
    return cast("RouterReplay", router.replay)


def _actions(router: LiveRouter) -> Any:
    """The enum of actions that the router's replay class compares with; it is of the same module."""
    return sys.modules[type(router.replay).__module__].RouterReplayAction
