"""vLLM's ``/v1/chat/completions`` and ``/v1/completions``.

Streams carry token ids and log-probs, but no routing; an engine that puts it into a stream's event, as
has been proposed, is understood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from arrow_tq.adapters import EngineOutput, Policy, vllm
from arrow_tq.proxy.document import Document, Object, Shape
from arrow_tq.proxy.protocols.base import (
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
from arrow_tq.proxy.protocols.chat import Deltas, read_chat
from arrow_tq_schemas.errors import InvalidInput, Unsupported
from arrow_tq_schemas.fields import Field

START = "routed_experts_prompt_start"
LISTED = ("content", "token_logprobs")
"""Where a choice's log-probs are: a chat's, and the older route's."""


class VllmChat:
    """The chat route."""

    shape = Shape(walked=frozenset(["choices"]), large=frozenset([ROUTED]))
    streams_tokens = True
    streams: frozenset[str] = frozenset()
    logprobs = "true"

    def read(self, request: Document) -> Prompt:
        return read_chat(request)

    def ask(self, request: Document, ask: Ask, stream: bool) -> bytes:
        root = request.root
        if not _asked(root.get("logprobs")):
            root.set("logprobs", self.logprobs)
        root.set("return_token_ids", "true")
        root.set(START, json.dumps(_start(root, ask)))
        if not stream and root.get("stream") is True:
            root.set("stream", "false")
            root.drop("stream_options")
        return request.render()

    def answer(self, request: Document, ask: Ask) -> VllmAnswer:
        return VllmAnswer(request.root, ask)


class VllmCompletions(VllmChat):
    """The older route, whose prompt may be token ids."""

    logprobs = "0"

    def read(self, request: Document) -> Prompt:
        root = request.root
        one_completion(root.get("n"), "n")
        if root.get("echo") is True:
            raise Unsupported("echo: a call that is recorded does not repeat its prompt")
        prompt = root.get("prompt")
        if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)):
            raise Unsupported("prompt: a call that is recorded has one prompt")
        if not isinstance(prompt, str | list):
            raise InvalidInput("prompt: expected text or a list of token ids")
        tokens = token_ids(prompt, "prompt") if isinstance(prompt, list) else None
        return Prompt(tokens, None, None, root.get("stream") is True)


class VllmAnswer:
    """Answers of one call."""

    def __init__(self, request: Object, ask: Ask) -> None:
        self.found = Found()
        self._logprobs = _asked(request.get("logprobs"))
        self._ids = request.get("return_token_ids") is True
        self._routed = START in request.members
        self._start, self.asked = number(request.get(START)), _start(request, ask)
        self._tokens: list[object] | None = None
        self._chances: list[object] | None = None
        self._choice: dict[str, object] = {}
        self._usage: object = None
        self._deltas = Deltas()

    def take(self, document: Document) -> bytes:
        root, found = document.root, self.found
        for choice in root.children("choices")[:1]:
            self._take_choice(document, choice)
            self._holder(choice)
        self._holder(root)
        if root.get("usage") is not None:
            self._usage = root.get("usage")
        if found.finished:
            found.response = self._response()
        return document.render()

    def _take_choice(self, document: Document, choice: Object) -> None:
        found = self.found
        ids, logprobs, routed = choice.get("token_ids"), choice.get("logprobs"), choice.get(ROUTED)
        if isinstance(ids, list):
            self._tokens = [*(self._tokens or ()), *ids]
        if isinstance(logprobs, dict):
            listed = next((logprobs[key] for key in LISTED if isinstance(logprobs.get(key), list)), None)
            if listed is not None:
                values = [one.get("logprob") if isinstance(one, dict) else one for one in listed]
                self._chances = [*(self._chances or ()), *values]
        if isinstance(routed, str):
            self._choice[ROUTED] = routed
        message = choice.members.get("message")
        if message is not None:
            found.reply = document.parsed(message)
        delta = choice.members.get("delta")
        if delta is not None:
            self._deltas.take(document.parsed(delta))
            found.reply = self._deltas.message()
        if choice.get("finish_reason") is not None:
            found.finished = True
            self._choice["finish_reason"] = choice.get("finish_reason")
        if not self._ids:
            choice.null("token_ids")
        if not self._logprobs:
            choice.null("logprobs")
        if not self._routed:
            choice.null(ROUTED)
        elif isinstance(routed, str) and self._start > self.asked:
            choice.set(ROUTED, json.dumps(later_rows(routed, self._start - self.asked, 0)))

    def _holder(self, holder: Object) -> None:
        self.found.receipts += receipts_of(holder.get(RECEIPTS), RECEIPTS)
        holder.drop(RECEIPTS)
        prompt = holder.get("prompt_token_ids")
        if prompt is not None:
            self.found.prompt = token_ids(prompt, "prompt_token_ids")
            if not self._ids:
                holder.null("prompt_token_ids")

    def _response(self) -> dict[str, object]:
        choice = dict(self._choice)
        if self._tokens is not None:
            choice["token_ids"] = self._tokens
        if self._chances is not None:
            choice["logprobs"] = {"token_logprobs": self._chances}
        response: dict[str, object] = {"choices": [choice]}
        if self._usage is not None:
            response["usage"] = self._usage
        return response

    def decode(
        self, fields: Mapping[str, Field], prompt_tokens: int, start: int, policy: Policy
    ) -> EngineOutput:
        return vllm.decode(
            self.found.response, fields=fields, prompt_tokens=prompt_tokens, start=start, policy=policy
        )

    def release(self) -> None:
        self.found.response = {}
        self._choice.clear()
        self._tokens = self._chances = None


def _asked(logprobs: object) -> bool:
    """``true``, or a number, which may be 0."""
    return logprobs is True or type(logprobs) is int


def _start(request: Object, ask: Ask) -> int:
    """The start to ask for: the agent's own where it wants routing from further before."""
    if START in request.members:
        return min(number(request.get(START)), ask.start)
    return ask.start
