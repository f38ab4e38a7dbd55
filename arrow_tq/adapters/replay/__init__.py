"""What the trainers' adapters share: the switch, a rank's rows, and routing fetched when a layer asks.

Nothing here knows a framework, and torch is loaded only when a tensor is made.
"""

from arrow_tq.adapters.replay.layout import ContextSplit, RankLayout
from arrow_tq.adapters.replay.pointer import BatchPointer
from arrow_tq.adapters.replay.source import LayerRouting, MicroBatchRouting, RoutingSource
from arrow_tq.adapters.replay.switch import Switch

__all__ = [
    "BatchPointer",
    "ContextSplit",
    "LayerRouting",
    "MicroBatchRouting",
    "RankLayout",
    "RoutingSource",
    "Switch",
]
