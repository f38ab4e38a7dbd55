"""vLLM: choices of ``/v1/completions``, ``/v1/chat/completions`` and ``/inference/v1/generate``.

From 0.22 on ``choices[i].routed_experts`` is a ``.npy`` in base64 with the rows of the whole sequence. 0.21
sent nested lists in two halves: ``prompt_routed_experts`` for the response, ``routed_experts`` for each
choice. Both have MoE layers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arrow_tq.adapters import npy
from arrow_tq.adapters.completion import ROUTED_EXPERTS, Ids, chosen, output
from arrow_tq.adapters.message import Message
from arrow_tq.adapters.output import EngineOutput
from arrow_tq.adapters.payload import ArrayRows, Base64Text, concatenate
from arrow_tq.adapters.policy import DEFAULT_POLICY, Policy, Window
from arrow_tq.adapters.rows import Layers
from arrow_tq_schemas.errors import RowCountMismatch
from arrow_tq_schemas.fields import Field

PROMPT_ROUTED_EXPERTS = "prompt_routed_experts"


def decode(
    response: Mapping[str, object],
    *,
    fields: Mapping[str, Field],
    prompt_tokens: int,
    start: int = 0,
    moe_layers: Sequence[int] | None = None,
    choice: int = 0,
    policy: Policy = DEFAULT_POLICY,
) -> EngineOutput:
    """One finished choice.

    Args:
        response: the parsed body; ask for ``return_token_ids`` so that it has the ids.
        fields: what to decode, by what it is called here: ``token_ids``, ``logprobs``, ``routed_experts``;
            ``run.fields`` is such a mapping. Others are left alone, but for ``indexer_topk``, which vLLM does
            not send and so cannot be asked of it.
        prompt_tokens: length of the prompt; the engine must count the same.
        start: the ``routed_experts_prompt_start`` that was asked for.
        moe_layers: global ids of the model's MoE layers, in order; None: exactly the field's own layers.
        choice: which of ``choices``.
        policy: what is known of this server; the row rule to the letter when left out.

    Raises:
        MalformedMessage: the response is not of this form, lacks a declared field and is no abort, or holds
            routing that was not captured.
        RowCountMismatch: rows or tokens do not add up; names the rule and the counts.
        ValueOutOfRange: an id that the field does not have; names the position.
        InvalidField, InvalidInput: the declaration itself does not fit.
    """
    top = Message(response, "response")
    one = top.element("choices", choice)
    tokens = chosen(top, one, prompt_tokens)
    window = Window(prompt_tokens, tokens.tokens, start)
    routed = _routed(top, one, fields.get(ROUTED_EXPERTS), moe_layers, prompt_tokens)
    return output(tokens, window, fields, policy, routed=routed, indexer=None, versions=())


def _routed(
    top: Message, choice: Message, field: Field | None, moe_layers: Sequence[int] | None, prompt_tokens: int
) -> Ids | None:
    if field is None:
        return None
    layers = Layers(field, moe_layers)
    value, place = choice.get(ROUTED_EXPERTS), choice.where(ROUTED_EXPERTS)
    prompt = top.get(PROMPT_ROUTED_EXPERTS)
    if value is None:
        return None
    if isinstance(value, str | bytes):
        return Ids(npy.rows_of(Base64Text(value, place), layers.item), layers, place)
    generated = ArrayRows.of(value, layers.item, place)
    if prompt is None:
        return Ids(generated, layers, place)
    before = ArrayRows.of(prompt, layers.item, top.where(PROMPT_ROUTED_EXPERTS))
    if before.rows != prompt_tokens:
        raise RowCountMismatch(
            f"{top.where(PROMPT_ROUTED_EXPERTS)}: {before.rows} rows for {prompt_tokens} prompt tokens",
            field=field.name,
            rows=before.rows,
            prompt_tokens=prompt_tokens,
        )
    return Ids(concatenate([before, generated]), layers, place)
