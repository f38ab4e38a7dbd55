"""What engines send, decoded: responses of SGLang and vLLM become rows that a step can put.

``sglang.decode`` and ``vllm.decode`` take a response and say what it holds as an ``EngineOutput``;
``record`` puts it on a step; ``StreamJoiner`` makes such a response of a stream's events. Nothing is guessed:
a response whose rows do not cover exactly the positions that they should is refused, unless the caller
declares the deviation with a ``Policy``.
"""

from arrow_tq.adapters.joining import StreamJoiner
from arrow_tq.adapters.output import EngineOutput, Rows, VersionSpan, record
from arrow_tq.adapters.policy import Policy, RowRule

__all__ = ["EngineOutput", "Policy", "RowRule", "Rows", "StreamJoiner", "VersionSpan", "record"]
