"""A small Qwen3-MoE with random weights whose router choices and log-probs are recorded as it runs.

The routers are the model's own (``transformers``); a forward hook on each copies the expert ids that it
chose. Rows follow the forward pass: row i belongs to the pass that consumed token i.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas import presets
from arrow_tq_schemas.errors import InvalidInput, Unsupported
from arrow_tq_schemas.fields import Field

FORWARD_TOKENS_MAX = 1024
"""Tokens of one forward pass; a longer input is fed in pieces over the key-value cache."""
LOGITS_ROWS_MAX = 256
"""Rows of logits, a vocabulary wide each, that exist at a time."""
EXPERTS_MAX = 256

TokenIds = Sequence[int] | npt.NDArray[np.int32]
Experts = npt.NDArray[np.uint8]
"""``[tokens, MoE layers, top-k]`` expert ids."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. Layer 0 is dense, every later one a mixture of experts."""

    vocabulary: int
    moe_layers: int = 4
    experts: int = 16
    topk: int = 4
    hidden: int = 64
    positions: int = 1 << 16
    """Longest sequence."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the MoE layers."""
        return tuple(range(1, self.moe_layers + 1))

    def routed_experts(self) -> Field:
        """The field that this model's routing fits."""
        return presets.routed_experts(topk=self.topk, num_experts=self.experts, layer_ids=self.layer_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Fed:
    """What a model said about the tokens it consumed."""

    experts: Experts
    """One row a consumed token."""
    states: Any
    """Last hidden states, torch ``[tokens, hidden]``."""


def make_model(shape: ModelShape, seed: int = 0) -> Any:
    """A ``Qwen3MoeForCausalLM`` of float32 random weights on the CPU; needs no network.

    Raises:
        Unsupported: torch or transformers is not installed.
    """
    torch, transformers = import_libraries()
    config = transformers.Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        moe_intermediate_size=shape.hidden // 2,
        num_hidden_layers=shape.moe_layers + 1,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=shape.positions,
        # Random weights of the usual 0.02 give logits so flat that all tokens are as likely.
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen3MoeForCausalLM(config)


class RecordedModel:
    """A model on the CPU, in evaluation mode, with a recorder on every router. Not thread-safe.

    Attributes:
        record_s: time that recording took so far.
    """

    def __init__(self, shape: ModelShape, seed: int = 0, dtype: str = "float32") -> None:
        """Make the model; needs no network.

        Args:
            dtype: of the weights and of the computation, such as ``bfloat16``.

        Raises:
            Unsupported: torch or transformers is not installed.
        """
        if shape.experts > EXPERTS_MAX:
            raise InvalidInput(f"{shape.experts} experts: at most {EXPERTS_MAX}, so that ids fit uint8")
        self.shape = shape
        self.record_s = 0.0
        self._torch, transformers = import_libraries()
        self._model = make_model(shape, seed).to(getattr(self._torch, dtype)).eval()
        self._cache_class = transformers.DynamicCache
        parameters = inspect.signature(type(self._model.model).forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._chosen: dict[int, Any] = {}
        for layer in shape.layer_ids:
            self._model.model.layers[layer].mlp.gate.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def keep(_module: object, _inputs: object, output: Any) -> None:
            # A router answers (logits, weights, indices [tokens, top-k]).
            self._chosen[layer] = output[2]

        return keep

    @property
    def parameters(self) -> int:
        return sum(weights.numel() for weights in self._model.parameters())

    def load(self, path: Path) -> None:
        """Take the weights of a ``.safetensors`` file, rounded to this model's dtype."""
        from safetensors.torch import load_file

        self._model.load_state_dict(load_file(path))

    def start(self) -> Context:
        """A new, empty sequence."""
        return Context(self)

    @contextmanager
    def inference(self) -> Iterator[None]:
        with self._torch.inference_mode():
            yield

    def forward(self, ids: TokenIds, cache: Any) -> Fed:
        """One forward pass of at most ``FORWARD_TOKENS_MAX`` tokens over a cache."""
        tokens = self._torch.tensor(np.asarray(ids, np.int64))[None]
        with self.inference():
            states = self._model.model(input_ids=tokens, use_cache=True, **{self._cache_keyword: cache})
            began = time.perf_counter()
            layers = [self._chosen.pop(layer) for layer in self.shape.layer_ids]
            chosen = self._torch.stack(layers, dim=1).numpy().astype(np.uint8)
            self.record_s += time.perf_counter() - began
        return Fed(chosen, states.last_hidden_state[0])

    def new_cache(self) -> Any:
        return self._cache_class(config=self._model.config)

    def logprobs(self, states: Any, targets: TokenIds) -> npt.NDArray[np.float32]:
        """Log-probability of ``targets[i]`` after the token of ``states[i]``; ``[tokens]``."""
        picked = self._torch.tensor(np.asarray(targets, np.int64))[:, None]
        found = np.empty(len(targets), np.float32)
        with self.inference():
            for first in range(0, len(targets), LOGITS_ROWS_MAX):
                rows = slice(first, first + LOGITS_ROWS_MAX)
                logs = self._torch.log_softmax(self._model.lm_head(states[rows]).float(), dim=-1)
                found[rows] = logs.gather(1, picked[rows])[:, 0].numpy()
        return found

    def sample(self, states: Any, rng: np.random.Generator) -> tuple[int, np.float32]:
        """A token drawn after the last of ``states``, and its log-probability."""
        with self.inference():
            logs = self._torch.log_softmax(self._model.lm_head(states[-1:]).float(), dim=-1)[0].numpy()
        token = int(np.argmax(logs + rng.gumbel(size=len(logs))))
        return token, np.float32(logs[token])


class Context:
    """One sequence in a model: tokens go in, routing and hidden states come out.

    Attributes:
        length: tokens consumed so far.
    """

    def __init__(self, model: RecordedModel) -> None:
        self._model = model
        self._cache = model.new_cache()
        self.length = 0

    def feed(self, ids: TokenIds) -> Iterator[Fed]:
        """Consume tokens after those before, in pieces of at most ``FORWARD_TOKENS_MAX``.

        Raises:
            InvalidInput: past the model's positions.
        """
        longest = self._model.shape.positions
        if self.length + len(ids) > longest:
            raise InvalidInput(f"a sequence of {self.length + len(ids)} tokens: the model takes {longest}")
        for first in range(0, len(ids), FORWARD_TOKENS_MAX):
            piece = ids[first : first + FORWARD_TOKENS_MAX]
            fed = self._model.forward(piece, self._cache)
            self.length += len(piece)
            yield fed

    def rewind(self, length: int) -> None:
        """Forget every token from position ``length`` on."""
        if length < self.length:
            self._cache.crop(length - self.length)  # negative: how many to drop
            self.length = length


def import_libraries() -> tuple[Any, Any]:
    """Torch and transformers, loaded quietly; raises ``Unsupported`` where they are missing."""
    # The progress bars and advice of the libraries do not belong on our terminal.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Threads that spin between small operations would starve the server on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise Unsupported(
            f"the model needs torch and transformers ({error}): pip install 'arrow-tq[demo]'"
        ) from None
    return torch, transformers
