"""What both engines' responses come down to: how the call ended, its tokens, versions, and payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arrow_tq.adapters import logprobs
from arrow_tq.adapters.logprobs import Column
from arrow_tq.adapters.message import Message, kind
from arrow_tq.adapters.output import EngineOutput, Rows, VersionSpan
from arrow_tq.adapters.payload import Payload
from arrow_tq.adapters.policy import Policy, Window
from arrow_tq.adapters.rows import Layers, indexer_rows, routed_rows
from arrow_tq_schemas.errors import MalformedMessage, RowCountMismatch
from arrow_tq_schemas.fields import TOKEN_FIELD, Field

LOGPROBS, ROUTED_EXPERTS, INDEXER_TOPK = "logprobs", "routed_experts", "indexer_topk"


@dataclass(frozen=True, slots=True)
class Located:
    """A list of the response, and where it was: for messages."""

    value: Column
    place: str


@dataclass(frozen=True, slots=True)
class Ids:
    """A payload of ids and the layers in it."""

    payload: Payload
    layers: Layers
    place: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of one call as the response tells them."""

    ids: Located | None
    """A list of token ids."""
    logprobs: Located | None
    """A list of log-probs, one a completion token."""
    tokens: int
    finish_reason: str | None

    @property
    def aborted(self) -> bool:
        return self.finish_reason == "abort"


def completion(
    ids: Located | None, logprobs: Located | None, told: int | None, finish_reason: str | None, place: str
) -> Completion:
    """The completion, once its counts agree.

    Args:
        ids: list of token ids, if there is one.
        logprobs: list of log-probs, if there is one.
        told: the count that the engine names, if it does.
        finish_reason: how the call ended.
        place: what the response is called in messages.

    Raises:
        RowCountMismatch: two counts differ; names both.
        MalformedMessage: nothing says how many tokens there are, and it is no abort.
    """
    counts = {found.place: len(found.value) for found in (ids, logprobs) if found is not None}
    if told is not None:
        counts[f"{place}: completion tokens"] = told
    if len(set(counts.values())) > 1:
        named = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise RowCountMismatch(f"completion tokens: {named}", counts=counts)
    if not counts and finish_reason != "abort":
        raise MalformedMessage(f"{place}: neither token ids nor log-probs nor a count of completion tokens")
    return Completion(ids, logprobs, next(iter(counts.values()), 0), finish_reason)


def chosen(top: Message, choice: Message, prompt_tokens: int) -> Completion:
    """The completion of an OpenAI-like choice; ``usage`` counts for it where it is the only one.

    Raises:
        RowCountMismatch, MalformedMessage: as ``completion`` and ``check_prompt``.
    """
    usage, told = top.child("usage"), None
    if usage is not None:
        check_prompt(usage.count("prompt_tokens"), prompt_tokens, usage.where("prompt_tokens"))
        told = usage.count("completion_tokens") if len(top.items("choices") or ()) == 1 else None
    ids, column = choice.items("token_ids"), logprobs.openai_column(choice)
    return completion(
        None if ids is None else Located(ids, choice.where("token_ids")),
        None if column is None else Located(column, choice.where("logprobs")),
        told,
        finish_reason(choice),
        top.place,
    )


def finish_reason(message: Message) -> str | None:
    """``stop``, ``length``, ``abort``, ...: a string, or SGLang's object with a ``type``."""
    value = message.get("finish_reason")
    if isinstance(value, Mapping):
        value = value.get("type")
        if value is None:
            raise MalformedMessage(f"{message.where('finish_reason')}: an object without a type")
    if value is None or isinstance(value, str):
        return value
    raise MalformedMessage(f"{message.where('finish_reason')}: expected a string, got {kind(value)}")


def check_prompt(told: int | None, prompt_tokens: int, place: str) -> None:
    """Raises ``RowCountMismatch`` if the engine counts another prompt: every position would be wrong."""
    if told is not None and told != prompt_tokens:
        raise RowCountMismatch(
            f"{place}: the engine counts {told} prompt tokens, the caller {prompt_tokens}",
            engine=told,
            prompt_tokens=prompt_tokens,
        )


def versions(message: Message | None, window: Window) -> tuple[VersionSpan, ...]:
    """Weight versions over the completion, at absolute positions.

    Raises:
        MalformedMessage: ``weight_versions`` are not contiguous from 0 to the completion's end.
    """
    if message is None or not window.completion_tokens:
        return ()
    spans = message.items("weight_versions")
    if spans is None:
        version = message.text("weight_version")
        return () if version is None else (VersionSpan(version, window.prompt_tokens, window.tokens),)
    found: list[VersionSpan] = []
    end = 0
    for index, entry in enumerate(spans):
        span = Message(entry, f"{message.where('weight_versions')}[{index}]")
        name, first, last = span.text("version"), span.count("start"), span.count("end")
        if name is None or first is None or last is None or first != end or last <= first:
            raise MalformedMessage(
                f"{span.place}: version {name!r} over [{first}, {last}): expected one from token {end} on"
            )
        found.append(VersionSpan(name, window.prompt_tokens + first, window.prompt_tokens + last))
        end = last
    if end != window.completion_tokens:
        raise MalformedMessage(
            f"{message.where('weight_versions')}: they end at {end} of {window.completion_tokens} tokens"
        )
    return tuple(found)


def output(
    tokens: Completion,
    window: Window,
    fields: Mapping[str, Field],
    policy: Policy,
    *,
    routed: Ids | None,
    indexer: Ids | None,
    versions: tuple[VersionSpan, ...],
) -> EngineOutput:
    """Decode what was found; every field of ``fields`` that engines know is in it, or it is an abort.

    Raises:
        MalformedMessage: a declared field did not come, and it is no abort.
    """
    whole = Window(window.prompt_tokens, window.completion_tokens)
    routed_experts = indexer_topk = None
    if routed is not None:
        field = fields[ROUTED_EXPERTS]
        routed_experts = routed_rows(routed.payload, field, routed.layers, window, policy, routed.place)
    if indexer is not None:
        indexer_topk = indexer_rows(indexer.payload, fields[INDEXER_TOPK], indexer.layers, whole, policy)
    decoded = EngineOutput(
        prompt_tokens=window.prompt_tokens,
        completion_tokens=window.completion_tokens,
        token_ids=_token_ids(tokens, window, fields.get(TOKEN_FIELD)),
        logprobs=_logprobs(tokens, window, fields.get(LOGPROBS)),
        routed_experts=routed_experts,
        indexer_topk=indexer_topk,
        versions=versions,
        finish_reason=tokens.finish_reason,
    )
    for name in (TOKEN_FIELD, LOGPROBS, ROUTED_EXPERTS, INDEXER_TOPK):
        if name in fields and getattr(decoded, name) is None and not tokens.aborted:
            raise MalformedMessage(
                f"the response has no {name}, and its finish reason is {tokens.finish_reason!r}: only an "
                "abort may come without (was it asked for? was the request preempted?)",
                field=fields[name].name,
                finish_reason=tokens.finish_reason,
            )
    return decoded


def _token_ids(tokens: Completion, window: Window, field: Field | None) -> Rows | None:
    if field is None or tokens.ids is None:
        return None
    values = logprobs.token_ids(tokens.ids.value, field, tokens.ids.place, window.prompt_tokens)
    return Rows(field, window.prompt_tokens, values)


def _logprobs(tokens: Completion, window: Window, field: Field | None) -> Rows | None:
    if field is None or tokens.logprobs is None:
        return None
    values = logprobs.float32(tokens.logprobs.value, tokens.logprobs.place, window.prompt_tokens)
    return Rows(field, window.prompt_tokens, values)
