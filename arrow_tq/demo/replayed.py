"""The trainer's model: float32, with gradients, whose routers choose what the rollout engine's chose.

A hook on each router puts recorded experts in the place of its own choice and computes their weights anew
from this model's logits, so that gradients flow as ever. What the experts were really given is observed
elsewhere, at the experts' own door, so that the two cannot agree by mistake.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay import MicroBatchRouting
from arrow_tq.adapters.replay.source import Stage
from arrow_tq.demo.model import ModelShape, import_libraries, make_model


class ReplayedModel:
    """A model on the CPU with recomputation in backward. Not thread-safe.

    Attributes:
        replay_s: time spent in replaying: reading a layer's routing and weighing it.
        reads: how often a layer's routing was read.
        model: the ``Qwen3MoeForCausalLM``.
    """

    def __init__(self, shape: ModelShape, seed: int, dtype: str = "float32") -> None:
        """Raises ``Unsupported`` where torch or transformers is not installed."""
        self.shape = shape
        self.replay_s = 0.0
        self.reads = 0
        self._torch, _ = import_libraries()
        self.model = make_model(shape, seed).to(getattr(self._torch, dtype)).train()
        # transformers is renaming it.
        enable = "activation_checkpointing_enable"
        if not hasattr(self.model, enable):
            enable = "gradient_checkpointing_enable"
        getattr(self.model, enable)({"use_reentrant": False})
        self._routing: MicroBatchRouting | None = None
        self._stage: Stage = "forward"
        self._observed: dict[int, Any] | None = None
        for layer in shape.layer_ids:
            block = self.model.model.layers[layer].mlp
            block.gate.register_forward_hook(self._replay(layer))
            block.experts.register_forward_pre_hook(self._observe(layer))

    @contextmanager
    def replaying(self, routing: MicroBatchRouting) -> Iterator[None]:
        """Routers choose this micro-batch's recorded experts, in forwards and in recomputation."""
        self._routing = routing
        try:
            yield
        finally:
            self._routing, self._stage = None, "forward"

    @contextmanager
    def observing(self) -> Iterator[dict[int, Any]]:
        """By layer, the experts that each token was really given: torch ``[rows, top-k]``."""
        found: dict[int, Any] = {}
        self._observed = found
        try:
            yield found
        finally:
            self._observed = None

    def token_logprobs(self, tokens: npt.NDArray[np.int64]) -> Any:
        """Log-probability of each token after those before it.

        Args:
            tokens: ``[sequences, length]``, padded on the right: attention is causal, so padding is not seen.

        Returns:
            torch float32 ``[sequences, length]``, with 0 for the first token.
        """
        ids = self._torch.from_numpy(tokens)
        states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        logs = self._torch.log_softmax(self.model.lm_head(states[:, :-1]).float(), dim=-1)
        found = logs.gather(2, ids[:, 1:, None])[..., 0]
        return self._torch.nn.functional.pad(found, (1, 0))

    def backward(self, loss: Any) -> None:
        """Gradients of ``loss``; recomputation reads the routing again."""
        self._stage = "backward"
        loss.backward()

    def no_grad(self) -> Any:
        return self._torch.no_grad()

    def copy_from(self, other: ReplayedModel) -> None:
        """Take another model's weights, rounded to this one's dtype."""
        self.model.load_state_dict(other.model.state_dict())

    def save(self, path: Path) -> None:
        """Write the weights as ``.safetensors``; whoever sees the file sees all of it."""
        from safetensors.torch import save_file

        unfinished = path.with_suffix(".tmp")
        save_file({name: value.contiguous() for name, value in self.model.state_dict().items()}, unfinished)
        unfinished.replace(path)

    def _replay(self, layer: int) -> Any:
        def choose(module: Any, _inputs: object, output: Any) -> Any:
            if self._routing is None:
                return None
            began = time.perf_counter()
            logits = output[0]
            layer_routing = self._routing.layer(layer)
            experts = layer_routing.materialize_for_routing_replay(self._stage).long()
            chances = self._torch.softmax(logits, dim=-1, dtype=self._torch.float32).gather(1, experts)
            if module.norm_topk_prob:
                chances = chances / chances.sum(dim=-1, keepdim=True)
            self.reads += 1
            self.replay_s += time.perf_counter() - began
            return logits, chances.to(logits.dtype), experts

        return choose

    def _observe(self, layer: int) -> Any:
        def see(_module: object, inputs: tuple[Any, ...]) -> None:
            if self._observed is not None:
                self._observed[layer] = inputs[1].detach()

        return see
