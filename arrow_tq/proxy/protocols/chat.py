"""What all chat routes have in common: their requests, and a whole answer told as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator

from arrow_tq.proxy.document import Document
from arrow_tq.proxy.protocols.base import Prompt, one_completion
from arrow_tq.proxy.sse import DONE, event_of
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage

CHUNK = "chat.completion.chunk"


def read_chat(request: Document) -> Prompt:
    """The messages and tools of a chat request."""
    root = request.root
    one_completion(root.get("n"), "n")
    member = root.members.get("messages")
    messages = None if member is None else request.parsed(member)
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("messages: a call that is recorded has a list of them")
    tools = root.members.get("tools")
    return Prompt(
        None, messages, None if tools is None else request.parsed(tools), root.get("stream") is True
    )


def wants_usage(request: Document) -> bool:
    """Whether a streamed request asks for a last event with the usage."""
    options = request.root.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def told_as_stream(body: bytes, usage: bool) -> Iterator[bytes]:
    """The events that say what a whole ``chat.completion`` says.

    Raises:
        MalformedMessage: it is none.
    """
    try:
        whole = json.loads(body)
        choices = whole.pop("choices")
        total = whole.pop("usage", None)
        if whole.get("object") == "chat.completion":
            whole["object"] = CHUNK
        last = {key: whole.pop(key) for key in list(whole) if key not in HEAD}
        last = {key: value for key, value in last.items() if value is not None}
        for choice in choices:
            yield _event(whole, [_delta(choice)])
            reason = {key: choice[key] for key in ("stop_reason", "matched_stop") if key in choice}
            final = {"index": choice["index"], "logprobs": None, "finish_reason": choice["finish_reason"]}
            empty: dict[str, object] = {"text": ""} if "text" in choice else {"delta": {}}
            final = {**final, **empty, **reason}
            yield _event(whole, [final], **({} if usage and total is not None else last))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedMessage(f"a chat answer that cannot be told as a stream: {error!r}") from None
    if usage and total is not None:
        yield _event(whole, [], usage=total, **last)
    yield event_of(DONE)


class Deltas:
    """The message that a stream's deltas add up to."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._calls: dict[int, dict[str, str]] = {}

    def take(self, delta: object) -> None:
        if not isinstance(delta, dict):
            return
        for key, value in delta.items():
            if isinstance(value, str):
                self._texts[key] = value if key == "role" else self._texts.get(key, "") + value
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(call.get("index"), int):
                self._call(self._calls.setdefault(call["index"], {}), call)

    def message(self) -> dict[str, object]:
        """In the shape of a whole answer's."""
        message: dict[str, object] = {"role": "assistant", "content": None, **self._texts}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.get("id"),
                    "type": call.get("type", "function"),
                    "function": {"name": call.get("name", ""), "arguments": call.get("arguments", "")},
                }
                for _, call in sorted(self._calls.items())
            ]
        return message

    def _call(self, known: dict[str, str], call: dict[str, object]) -> None:
        function = call.get("function")
        parts = {**call, **(function if isinstance(function, dict) else {})}
        for key in ("id", "type"):
            if isinstance(value := parts.get(key), str):
                known[key] = value
        for key in ("name", "arguments"):
            if isinstance(value := parts.get(key), str):
                known[key] = known.get(key, "") + value


HEAD = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
"""What every event of a stream repeats."""


def _delta(choice: dict[str, object]) -> dict[str, object]:
    head = {"index": choice["index"], "logprobs": choice.get("logprobs"), "finish_reason": None}
    if "text" in choice:
        return {**head, "text": choice["text"]}
    message = choice["message"]
    assert isinstance(message, dict)
    delta = {key: value for key, value in message.items() if value is not None}
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    return {**head, "delta": delta}


def _event(head: dict[str, object], choices: list[dict[str, object]], **more: object) -> bytes:
    return event_of(json.dumps({**head, "choices": choices, **more}, separators=(",", ":")).encode("ascii"))
