"""SGLang: responses of ``/generate`` and of its OpenAI route.

``meta_info.routed_experts`` is base64 of flat ids, logically ``[rows, hidden layers, topk]``: int32, or what
``routed_experts_dtype`` names. It has *every* hidden layer; dense ones are zeros and are dropped here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from arrow_tq.adapters import logprobs
from arrow_tq.adapters.completion import (
    INDEXER_TOPK,
    ROUTED_EXPERTS,
    Completion,
    Ids,
    Located,
    check_prompt,
    chosen,
    completion,
    finish_reason,
    output,
    versions,
)
from arrow_tq.adapters.message import Message
from arrow_tq.adapters.output import EngineOutput
from arrow_tq.adapters.payload import ArrayRows, Base64Text, EncodedRows
from arrow_tq.adapters.policy import DEFAULT_POLICY, Policy, Window
from arrow_tq.adapters.rows import Layers
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage
from arrow_tq_schemas.fields import Field

_WIRE_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int32", "uint16", "uint8")}


def decode(
    response: Mapping[str, object],
    *,
    fields: Mapping[str, Field],
    prompt_tokens: int,
    start: int = 0,
    hidden_layers: int | None = None,
    indexer_layers: int | None = None,
    choice: int = 0,
    policy: Policy = DEFAULT_POLICY,
) -> EngineOutput:
    """One finished call.

    Args:
        response: the parsed body: one object with ``meta_info``, or with ``choices``.
        fields: what to decode, by what it is called here: ``token_ids``, ``logprobs``, ``routed_experts``,
            ``indexer_topk``; ``run.fields`` is such a mapping. Others are left alone.
        prompt_tokens: length of the prompt; the engine must count the same.
        start: the ``routed_experts_start_len`` that was asked for. Indexer rows always begin at 0.
        hidden_layers: hidden layers of the model, dense ones included; None: exactly the field's own layers.
        indexer_layers: layers with an indexer; None: exactly the field's own.
        choice: which of ``choices``.
        policy: what is known of this server; the row rule to the letter when left out.

    Raises:
        MalformedMessage: the response is not of this form, lacks a declared field and is no abort, or holds
            routing that was not captured.
        RowCountMismatch: rows, tokens or versions do not add up; names the rule and the counts.
        ValueOutOfRange: an id that the field does not have; names the position.
        InvalidField, InvalidInput: the declaration itself does not fit.
    """
    top = Message(response, "response")
    call = _Call(fields, prompt_tokens, start, hidden_layers, indexer_layers, policy)
    return _generate(top, call) if top.get("choices") is None else _openai(top, call, choice)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of ``decode`` that both routes need."""

    fields: Mapping[str, Field]
    prompt_tokens: int
    start: int
    hidden_layers: int | None
    indexer_layers: int | None
    policy: Policy


def _generate(top: Message, call: _Call) -> EngineOutput:
    meta = top.child("meta_info")
    if meta is None:
        raise MalformedMessage("response: neither meta_info nor choices")
    check_prompt(meta.count("prompt_tokens"), call.prompt_tokens, meta.where("prompt_tokens"))
    tokens = _generated(top, meta)
    window = Window(call.prompt_tokens, tokens.tokens, call.start)
    return output(
        tokens,
        window,
        call.fields,
        call.policy,
        routed=_ids(meta, ROUTED_EXPERTS, call.fields, call.hidden_layers),
        indexer=_ids(meta, INDEXER_TOPK, call.fields, call.indexer_layers),
        versions=versions(meta, window),
    )


def _generated(top: Message, meta: Message) -> Completion:
    """Ids and log-probs: from the tuples, or ``output_ids`` alone where no log-probs were asked for."""
    entries, place = meta.items("output_token_logprobs"), meta.where("output_token_logprobs")
    listed = top.items("output_ids")
    ids = None if listed is None else Located(listed, top.where("output_ids"))
    chances = None
    if entries is not None:
        first, second = logprobs.columns(entries, place)
        chances = Located(first, place)
        ids = _same(ids, Located(second, place))
    told = meta.count("completion_tokens")
    return completion(ids, chances, told, finish_reason(meta), "response.meta_info")


def _same(listed: Located | None, paired: Located) -> Located:
    """The ids beside the log-probs, which those listed elsewhere must repeat."""
    if listed is not None and len(listed.value) == len(paired.value):
        one, other = (logprobs.token_ids(ids.value, None, ids.place, 0) for ids in (listed, paired))
        if not np.array_equal(one, other):
            raise MalformedMessage(f"{listed.place} and the ids of {paired.place} differ")
    return paired


def _openai(top: Message, call: _Call, choice: int) -> EngineOutput:
    one = top.element("choices", choice)
    tokens = chosen(top, one, call.prompt_tokens)
    window = Window(call.prompt_tokens, tokens.tokens, call.start)
    extension = _extension(top, one)
    routed = None if extension is None else _ids(extension, ROUTED_EXPERTS, call.fields, call.hidden_layers)
    found = versions(top.child("metadata"), window)
    return output(tokens, window, call.fields, call.policy, routed=routed, indexer=None, versions=found)


def _extension(top: Message, choice: Message) -> Message | None:
    """SGLang's own object: at the choice, or at the response, where it belongs to its only choice."""
    found = [part for part in (choice.child("sgl_ext"), choice.child("sglext")) if part is not None]
    whole = top.child("sglext")
    if whole is not None:
        if len(top.items("choices") or ()) != 1 and whole.get(ROUTED_EXPERTS) is not None:
            raise MalformedMessage(f"{whole.where(ROUTED_EXPERTS)}: of which choice is not said")
        found.append(whole)
    holders = [part for part in found if part.get(ROUTED_EXPERTS) is not None]
    if len(holders) > 1:
        places = " and ".join(part.where(ROUTED_EXPERTS) for part in holders)
        raise MalformedMessage(f"{places}: both are there")
    return holders[0] if holders else None


def _ids(message: Message, name: str, fields: Mapping[str, Field], sent: int | None) -> Ids | None:
    """The payload ``name`` of a message, if the caller declared it and it is there."""
    field, value, place = fields.get(name), message.get(name), message.where(name)
    if field is None:
        return None
    if sent is not None and (type(sent) is not int or sent < 1):
        raise InvalidInput(f"layers {sent!r}: expected a positive integer")
    layers = Layers(field, None if sent is None else range(sent))
    if value is None:
        return None
    if not isinstance(value, str | bytes):
        return Ids(ArrayRows.of(value, layers.item, place), layers, place)
    named = message.text(f"{name}_dtype") or "int32"
    dtype = _WIRE_DTYPES.get(named)
    if dtype is None:
        raise MalformedMessage(
            f"{message.where(f'{name}_dtype')}: {named!r}, expected one of {', '.join(_WIRE_DTYPES)}"
        )
    return Ids(EncodedRows.flat(Base64Text(value, place), layers.item, dtype), layers, place)
