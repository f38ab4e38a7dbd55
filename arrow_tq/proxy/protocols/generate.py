"""SGLang's ``/generate``, whole and streamed.

A streamed event holds the answer so far, or (where the server was started so) what is new: the count of
completion tokens in each event tells which, and nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from arrow_tq.adapters import EngineOutput, Policy, sglang
from arrow_tq.proxy.document import Document, Object, Shape
from arrow_tq.proxy.protocols.base import (
    INDEXER,
    RECEIPTS,
    ROUTED,
    Ask,
    Found,
    Prompt,
    later_rows,
    number,
    one_completion,
    receipts_of,
    token_ids,
)
from arrow_tq_schemas.errors import InvalidInput, RowCountMismatch, Unsupported
from arrow_tq_schemas.fields import Field

LOGPROB_KEYS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
    "output_token_logprobs_length",
)
"""What ``return_logprob`` adds to ``meta_info``."""
PLAIN_KEYS = (
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "weight_version",
    "weight_versions",
    "routed_experts_dtype",
)
"""What decoding needs of ``meta_info``, beside the lists and the payload."""


class Generate:
    """The native route."""

    shape = Shape(walked=frozenset(["meta_info"]), large=frozenset([ROUTED, INDEXER]))
    streams_tokens = True
    streams = frozenset([ROUTED, INDEXER])

    def __init__(self, hidden_layers: int | None = None) -> None:
        self._hidden_layers = hidden_layers

    def read(self, request: Document) -> Prompt:
        """The prompt's tokens, where the agent sends tokens."""
        root = request.root
        ids, text = root.get("input_ids"), root.get("text")
        if isinstance(text, list) or (isinstance(ids, list) and ids and isinstance(ids[0], list)):
            raise Unsupported("/generate: a call that is recorded has one prompt")
        parameters = root.get("sampling_params")
        if isinstance(parameters, dict):
            one_completion(parameters.get("n"), "sampling_params.n")
        if ids is None and not isinstance(text, str):
            raise InvalidInput("/generate: a call that is recorded has input_ids, or text")
        tokens = None if ids is None else token_ids(ids, "input_ids")
        return Prompt(tokens, None, None, root.get("stream") is True)

    def ask(self, request: Document, ask: Ask, stream: bool) -> bytes:
        root = request.root
        root.set("return_logprob", "true")
        if root.get("input_ids") is None:
            root.set("return_prompt_token_ids", "true")
        if ROUTED in ask.fields:
            root.set("return_routed_experts", "true")
        root.set("routed_experts_start_len", json.dumps(asked_start(root, ask)))
        if INDEXER in ask.fields:
            root.set("return_indexer_topk", "true")
        return request.render()

    def answer(self, request: Document, ask: Ask) -> GenerateAnswer:
        return GenerateAnswer(MetaWishes.of(request.root, "return_logprob", ask), self._hidden_layers)


def asked_start(request: Object, ask: Ask) -> int:
    """The start to ask for: the agent's own where it wants routing from further before."""
    if request.get("return_routed_experts") is True:
        return min(number(request.get("routed_experts_start_len")), ask.start)
    return ask.start


class MetaWishes:
    """What the agent itself asked for of a ``meta_info``."""

    def __init__(
        self, logprobs: bool, routed: bool, indexer: bool, start: int, asked: int, prompt: bool
    ) -> None:
        self.logprobs = logprobs
        self.routed = routed
        self.indexer = indexer
        self.prompt = prompt
        self.start = start
        """The agent's own start."""
        self.asked = asked
        """The start that the engine was asked for."""

    @classmethod
    def of(cls, request: Object, logprobs: str, ask: Ask) -> MetaWishes:
        """``logprobs`` is the key that asks for them on this route."""
        return cls(
            request.get(logprobs) is True,
            request.get("return_routed_experts") is True,
            request.get("return_indexer_topk") is True,
            number(request.get("routed_experts_start_len")),
            asked_start(request, ask),
            request.get("return_prompt_token_ids") is True,
        )

    def strip(self, meta: Object) -> None:
        """Cut what the agent did not ask for."""
        meta.drop(RECEIPTS)
        if not self.logprobs:
            meta.drop(*LOGPROB_KEYS)
        if not self.indexer:
            meta.drop(INDEXER)
        if not self.routed:
            meta.drop(ROUTED, "routed_experts_dtype")
        elif self.start > self.asked and isinstance(text := meta.get(ROUTED), str):
            total = number(meta.get("prompt_tokens")) + number(meta.get("completion_tokens"))
            meta.set(ROUTED, json.dumps(self.later(text, total - 1 - self.asked)))

    def later(self, text: str, rows: int) -> str:
        """The payload from the agent's own start on."""
        return later_rows(text, self.start - self.asked, rows)


class MetaParts:
    """What the ``meta_info`` of one answer, or of a stream's events, held."""

    def __init__(self) -> None:
        self.meta: dict[str, object] = {}
        self._pairs: list[object] = []
        self._ids: list[object] | None = None

    def take(self, root: Object, meta: Object) -> None:
        for key in (*PLAIN_KEYS, ROUTED, INDEXER):
            value = meta.get(key)
            if value is not None:
                self.meta[key] = value
        count = meta.get("completion_tokens")
        told = count if type(count) is int else None
        pairs, ids = meta.get("output_token_logprobs"), root.get("output_ids")
        if isinstance(pairs, list):
            self._pairs = _joined(self._pairs, pairs, told, "output_token_logprobs")
        if isinstance(ids, list):
            self._ids = _joined(self._ids or [], ids, told, "output_ids")

    def response(self) -> dict[str, object]:
        meta = dict(self.meta)
        if self._pairs or not self._ids:
            meta["output_token_logprobs"] = self._pairs
        response: dict[str, object] = {"meta_info": meta}
        if self._ids is not None:
            response["output_ids"] = self._ids
        return response


class SglangAnswer:
    """What the answers of both routes share: their parts, gathered until they are decoded."""

    def __init__(self, wishes: MetaWishes, hidden_layers: int | None) -> None:
        self.found = Found()
        self._wishes = wishes
        self._hidden_layers = hidden_layers
        self._parts = MetaParts()

    @property
    def asked(self) -> int:
        return self._wishes.asked

    def decode(
        self, fields: Mapping[str, Field], prompt_tokens: int, start: int, policy: Policy
    ) -> EngineOutput:
        return sglang.decode(
            self.found.response,
            fields=fields,
            prompt_tokens=prompt_tokens,
            start=start,
            hidden_layers=self._hidden_layers,
            policy=policy,
        )

    def release(self) -> None:
        self.found.response = {}
        self._parts = MetaParts()


def _joined(before: list[object], now: list[object], told: int | None, what: str) -> list[object]:
    """The list so far: ``now`` where it is the whole, else what was before and ``now``."""
    if told is None or len(now) == told:
        return now
    if len(before) + len(now) == told:
        before.extend(now)
        return before
    if len(before) == told and not now:
        return before
    raise RowCountMismatch(
        f"{what}: {len(now)} after {len(before)}, of {told} completion tokens", now=len(now), told=told
    )


class GenerateAnswer(SglangAnswer):
    """Answers of one call of the native route."""

    def take(self, document: Document) -> bytes:
        root = document.root
        meta = root.child("meta_info")
        if meta is None:
            return document.render()
        self._parts.take(root, meta)
        found = self.found
        found.receipts += receipts_of(meta.get(RECEIPTS), f"meta_info.{RECEIPTS}")
        prompt = root.get("prompt_token_ids")
        if prompt is not None:
            found.prompt = token_ids(prompt, "prompt_token_ids")
            if not self._wishes.prompt:
                root.drop("prompt_token_ids")
        if meta.get("finish_reason") is not None:
            found.finished = True
            found.response = self._parts.response()
        self._wishes.strip(meta)
        return document.render()
