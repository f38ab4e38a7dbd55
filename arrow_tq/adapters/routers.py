"""The routers of a live model, found by walking it, named by global layer id.

A list of routers in the order in which they were made says nothing about which layer each belongs to:
multi-token prediction adds some, virtual pipelines interleave them, dense layers leave gaps, and models
that are gone stay in it. So routers are found in the modules that will run, and each says its own layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arrow_tq_schemas.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from torch import nn

PREDICTION_CLASSES = "MultiTokenPrediction"
"""Modules of classes named so predict tokens further ahead; rollout engines send no routing for them."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveRouter:
    """One router of a live model.

    Attributes:
        layer_id: global id of its layer, from 0.
        chunk: which model chunk (virtual pipeline stage) it is in.
        path: its name in that chunk.
        module: the router.
        replay: what the framework keeps on it.
    """

    layer_id: int
    chunk: int
    path: str
    module: nn.Module
    replay: object


def live_routers(chunks: Sequence[nn.Module], attribute: str) -> list[LiveRouter]:
    """The routers of a rank's model chunks, by chunk and layer.

    A router is a module with ``attribute`` set and Megatron's ``layer_number``, which counts from 1 over
    the whole model. Those of multi-token prediction are left out.

    Args:
        chunks: the rank's model chunks; one without virtual pipelines.
        attribute: where the framework keeps a router's replay (``router_replay``, ``routing_replay``).

    Raises:
        InvalidInput: no router, or one that does not know its layer.
        Conflict: two live routers of one layer; names both.
    """
    found: list[LiveRouter] = []
    for chunk, model in enumerate(chunks):
        prediction = _prediction_paths(model)
        for path, module in model.named_modules():
            replay = getattr(module, attribute, None)
            if replay is None or _is_prediction(path, module, prediction):
                continue
            found.append(LiveRouter(_layer_id(module, chunk, path), chunk, path, module, replay))
    if not found:
        raise InvalidInput(
            f"no router with {attribute!r} in {len(chunks)} model chunks: routing replay must be enabled "
            "when the model is made"
        )
    _refuse_twins(found)
    return sorted(found, key=lambda router: (router.chunk, router.layer_id))


def _prediction_paths(model: nn.Module) -> list[str]:
    return [
        path for path, module in model.named_modules() if type(module).__name__.startswith(PREDICTION_CLASSES)
    ]


def _is_prediction(path: str, module: nn.Module, prediction: Sequence[str]) -> bool:
    inside = any(not above or path == above or path.startswith(f"{above}.") for above in prediction)
    return inside or bool(getattr(module, "is_mtp_layer", False))


def _layer_id(module: nn.Module, chunk: int, path: str) -> int:
    number = getattr(module, "layer_number", None)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InvalidInput(
            f"router {path!r} of chunk {chunk} has layer_number {number!r}: expected its number in the whole "
            "model, from 1"
        )
    return number - 1


def _refuse_twins(found: Sequence[LiveRouter]) -> None:
    seen: dict[int, LiveRouter] = {}
    for router in found:
        twin = seen.setdefault(router.layer_id, router)
        if twin is not router:
            raise Conflict(
                f"layer {router.layer_id} has two routers: {twin.path!r} of chunk {twin.chunk} and "
                f"{router.path!r} of chunk {router.chunk}",
                layer=router.layer_id,
            )
