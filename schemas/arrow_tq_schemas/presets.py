"""Ready-made fields, as engines send them and trainers want them."""

from __future__ import annotations

from collections.abc import Sequence

from arrow_tq_schemas.dtypes import smallest_id_dtype
from arrow_tq_schemas.fields import TOKEN_FIELD, Field

__all__ = ["indexer_topk", "logprobs", "loss_mask", "routed_experts", "token_ids"]


def token_ids(dtype: str = "int32") -> Field:
    """Token ids, one a position, prompt and completion. Its name is settled: rewrites are found by it."""
    return Field(TOKEN_FIELD, dtype)


def logprobs(name: str = "logprobs", dtype: str = "float32") -> Field:
    """Log-probabilities of the sampled tokens; other positions read as 0.0."""
    return Field(name, dtype, domain="sampled", fill=0.0)


def loss_mask(name: str = "loss_mask", dtype: str = "uint8") -> Field:
    """1 where a token carries loss; positions that nobody sampled read as 0."""
    return Field(name, dtype, domain="sampled", fill=0)


def routed_experts(
    layers: int | None = None,
    topk: int = 8,
    num_experts: int = 256,
    *,
    layer_ids: Sequence[int] | None = None,
    layer_groups: Sequence[Sequence[int]] | None = None,
    name: str = "routed_experts",
    dtype: str | None = None,
) -> Field:
    """The router's choice in every MoE layer: ``[layers, topk]`` ids, T-1 rows, first write wins.

    A later prefill must not replace routing recorded while decoding, hence ``overlay="first"``.
    The dtype is the narrowest that holds ``num_experts``.
    """
    count = len(layer_ids) if layers is None and layer_ids is not None else layers
    return Field(
        name,
        dtype or smallest_id_dtype(num_experts),
        shape=(count if count is not None else 0, topk),
        layer_axis=0,
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        layer_groups=None if layer_groups is None else tuple(tuple(group) for group in layer_groups),
        num_experts=num_experts,
        domain="forwarded",
        overlay="first",
    )


def indexer_topk(
    layers: int,
    topk: int = 2048,
    *,
    layer_ids: Sequence[int] | None = None,
    layer_groups: Sequence[Sequence[int]] | None = None,
    name: str = "indexer_topk",
) -> Field:
    """Positions that a sparse-attention indexer chose: ``[layers, topk]`` int32, -1 pads inside rows."""
    return Field(
        name,
        "int32",
        shape=(layers, topk),
        layer_axis=0,
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        layer_groups=None if layer_groups is None else tuple(tuple(group) for group in layer_groups),
        domain="forwarded",
        fill=-1,
        pad=-1,
    )
