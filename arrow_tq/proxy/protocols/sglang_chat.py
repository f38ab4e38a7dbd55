"""SGLang's ``/v1/chat/completions``.

Token ids and log-probs come in ``choices[0].meta_info``, which is the native route's. Routing is there too,
and in ``sglext`` of the response (``sgl_ext`` of the choice in older versions). Streams have no token ids.
"""

from __future__ import annotations

import json

from arrow_tq.proxy.document import Document, Object, Shape
from arrow_tq.proxy.protocols.base import (
    INDEXER,
    RECEIPTS,
    ROUTED,
    Ask,
    Prompt,
    receipts_of,
    token_ids,
)
from arrow_tq.proxy.protocols.chat import read_chat
from arrow_tq.proxy.protocols.generate import MetaWishes, SglangAnswer, asked_start
from arrow_tq_schemas.errors import MalformedMessage

EXTENSIONS = ("sglext", "sgl_ext")


class SglangChat:
    """SGLang's OpenAI route."""

    shape = Shape(walked=frozenset(["choices", "meta_info", *EXTENSIONS]), large=frozenset([ROUTED, INDEXER]))
    streams_tokens = False
    streams: frozenset[str] = frozenset()

    def __init__(self, hidden_layers: int | None = None) -> None:
        self._hidden_layers = hidden_layers

    def read(self, request: Document) -> Prompt:
        return read_chat(request)

    def ask(self, request: Document, ask: Ask, stream: bool) -> bytes:
        root = request.root
        root.set("logprobs", "true")
        root.set("return_meta_info", "true")
        root.set("return_prompt_token_ids", "true")
        if ROUTED in ask.fields:
            root.set("return_routed_experts", "true")
        root.set("routed_experts_start_len", json.dumps(asked_start(root, ask)))
        if INDEXER in ask.fields:
            root.set("return_indexer_topk", "true")
        if not stream and root.get("stream") is True:
            root.set("stream", "false")
            root.drop("stream_options")
        return request.render()

    def answer(self, request: Document, ask: Ask) -> SglangChatAnswer:
        root = request.root
        wishes = MetaWishes.of(root, "logprobs", ask)
        return SglangChatAnswer(wishes, root.get("return_meta_info") is True, self._hidden_layers)


class SglangChatAnswer(SglangAnswer):
    """Answers of one call of the chat route."""

    def __init__(self, wishes: MetaWishes, wants_meta: bool, hidden_layers: int | None) -> None:
        super().__init__(wishes, hidden_layers)
        self._wants_meta = wants_meta

    def take(self, document: Document) -> bytes:
        root, found = document.root, self.found
        for choice in root.children("choices")[:1]:
            self._choice(document, choice)
        for holder in (root, *root.children("choices")[:1]):
            self._extension(holder)
        self._receipts(root)
        if self.found.finished:
            found.response = self._parts.response()
        return document.render()

    def _choice(self, document: Document, choice: Object) -> None:
        found, wishes = self.found, self._wishes
        prompt = choice.get("prompt_token_ids")
        if prompt is not None:
            found.prompt = token_ids(prompt, "choices[0].prompt_token_ids")
        if not wishes.prompt:
            choice.drop("prompt_token_ids")
        if not wishes.logprobs:
            choice.null("logprobs")
        message = choice.members.get("message")
        if message is not None:
            found.reply = document.parsed(message)
        meta = choice.child("meta_info")
        if meta is not None:
            self._parts.take(choice, meta)
            self._receipts(meta)
            if self._wants_meta:
                wishes.strip(meta)
            else:
                choice.drop("meta_info")
        self._receipts(choice)
        if choice.get("finish_reason") is not None:
            if not self._parts.meta:
                raise MalformedMessage("choices[0]: no meta_info, which was asked for: it has the token ids")
            found.finished = True

    def _extension(self, holder: Object) -> None:
        for name in EXTENSIONS:
            extension = holder.child(name)
            if extension is None:
                continue
            self._receipts(extension)
            routed = extension.get(ROUTED)
            if isinstance(routed, str):
                self._parts.meta[ROUTED] = routed
                dtype = extension.get("routed_experts_dtype")
                if dtype is not None:
                    self._parts.meta["routed_experts_dtype"] = dtype
            if not self._wishes.routed:
                extension.drop(ROUTED, "routed_experts_dtype")
            elif isinstance(routed, str) and self._wishes.start > self._wishes.asked:
                extension.set(ROUTED, json.dumps(self._wishes.later(routed, self._rows())))
            if extension.empty or (set(extension.members) == {ROUTED} and not self._wishes.routed):
                holder.drop(name)

    def _rows(self) -> int:
        counts = [self._parts.meta.get(key) for key in ("prompt_tokens", "completion_tokens")]
        return sum(one for one in counts if isinstance(one, int)) - 1 - self._wishes.asked

    def _receipts(self, holder: Object) -> None:
        self.found.receipts += receipts_of(holder.get(RECEIPTS), RECEIPTS)
        holder.drop(RECEIPTS)
