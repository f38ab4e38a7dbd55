"""Streamed answers: events put together into what the same call would have answered in one piece.

SGLang's ``/generate`` repeats, in each event, all tokens so far, or (as its server was started) sends what is
new; either way an event counts the tokens so far, which tells the two apart list by list. OpenAI-like routes
send what is new. Of everything else (payloads, versions, usage) the newest counts; whether it is whole is for
``decode`` to find out, by the row rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from arrow_tq.adapters.message import Message
from arrow_tq_schemas.errors import MalformedMessage, RowCountMismatch

DONE = "[DONE]"
_PAIRS, _IDS = "output_token_logprobs", "output_ids"


class StreamJoiner:
    """The events of one streamed call. Feed each, then ``decode(joiner.response(), ...)``.

    Args:
        choice: which of several completions; ``decode`` is asked for the same one.

    Attributes:
        finished: whether the completion's end has come.
    """

    def __init__(self, choice: int = 0) -> None:
        self.finished = False
        self._choice = choice
        self._events = 0
        self._top: dict[str, object] = {}
        self._meta: dict[str, object] | None = None
        self._lists: dict[str, list[object]] = {}
        self._joined: dict[str, object] | None = None
        self._choices = 0

    def feed(self, event: Mapping[str, object] | str | bytes) -> None:
        """Take one event: parsed, or the text after its ``data:``, which may be ``[DONE]``.

        Raises:
            MalformedMessage: it is no event of such a stream, or an error; or tokens come after the end.
            RowCountMismatch: a list is neither all tokens so far nor the new ones; names the counts.
        """
        if isinstance(event, str | bytes):
            text = event.decode("utf-8", "replace") if isinstance(event, bytes) else event
            if text.strip() == DONE:
                return
            try:
                event = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise MalformedMessage(f"event {self._events}: not JSON ({error})") from None
        top = Message(event, f"event {self._events}")
        self._events += 1
        if top.get("error") is not None:
            raise MalformedMessage(
                f"{top.place}: the engine ends with an error: {str(top.get('error'))[:300]}"
            )
        choices = top.items("choices")
        meta = top.child("meta_info")
        if choices is None and meta is None:
            raise MalformedMessage(f"{top.place}: neither meta_info nor choices")
        if choices is not None:
            self._take_choices(top, choices)
        elif meta is not None and (top.count("index") or 0) == self._choice:
            self._take_meta(top, meta)

    def response(self) -> dict[str, object]:
        """What one piece would have been.

        Raises:
            MalformedMessage: the stream broke off before the completion's end.
        """
        if not self.finished:
            raise MalformedMessage(
                f"stream: it ends after {self._events} events without a finish reason: it was cut off",
                events=self._events,
            )
        if self._meta is not None:
            meta = {**self._meta, **({_PAIRS: self._lists[_PAIRS]} if _PAIRS in self._lists else {})}
            ids = {_IDS: self._lists[_IDS]} if _IDS in self._lists else {}
            return {**self._top, **ids, "meta_info": meta}
        others: list[object] = [{} for _ in range(self._choices)]
        others[self._choice] = self._joined
        return {**self._top, "choices": others}

    # -- SGLang's own route --------------------------------------------------------------------

    def _take_meta(self, top: Message, meta: Message) -> None:
        self._check_going_on(top)
        told = meta.count("completion_tokens")
        for holder, name in ((meta, _PAIRS), (top, _IDS)):
            new = holder.items(name)
            if new is not None:
                self._lists[name] = _joined(self._lists.get(name), new, told, holder.where(name))
        self._top.update(_there(top, ("meta_info", _IDS)))
        self._meta = {**(self._meta or {}), **_there(meta, (_PAIRS,))}
        self.finished = meta.get("finish_reason") is not None

    # -- OpenAI-like routes --------------------------------------------------------------------

    def _take_choices(self, top: Message, choices: Sequence[object]) -> None:
        self._top.update(_there(top, ("choices",)))
        for place in range(len(choices)):
            choice = top.element("choices", place)
            index = choice.count("index") or 0
            self._choices = max(self._choices, index + 1)
            if index == self._choice:
                self._take_choice(choice)

    def _take_choice(self, choice: Message) -> None:
        self._check_going_on(choice)
        joined = self._joined = self._joined or {}
        ids, logprobs = choice.items("token_ids"), choice.child("logprobs")
        if ids is not None:
            joined["token_ids"] = _extended(joined.get("token_ids"), ids)
        if logprobs is not None:
            before = joined.get("logprobs")
            parts = dict(before) if isinstance(before, dict) else {}
            for name in logprobs.value:
                new = logprobs.get(name)
                if isinstance(new, list | tuple):
                    parts[name] = _extended(parts.get(name), new)
            joined["logprobs"] = parts
        joined.update(_there(choice, ("token_ids", "logprobs", "delta")))
        self.finished = choice.get("finish_reason") is not None

    def _check_going_on(self, message: Message) -> None:
        if self.finished:
            raise MalformedMessage(f"{message.place}: it comes after the completion's end")


def _there(message: Message, but: Sequence[str]) -> dict[str, object]:
    """What an event says; null says nothing."""
    return {key: value for key, value in message.value.items() if value is not None and key not in but}


def _extended(before: object, new: Sequence[object]) -> list[object]:
    if not isinstance(before, list):
        return list(new)
    before.extend(new)
    return before


def _joined(before: list[object] | None, new: Sequence[object], told: int | None, place: str) -> list[object]:
    """The list of all tokens so far, whichever of the two an event has."""
    if before is None or not before:
        before = []
    elif told is None:
        raise MalformedMessage(f"{place}: more tokens, and no completion_tokens to tell how many there are")
    if told is None or len(new) == told:
        if before and new[len(before) - 1 : len(before)] != [before[-1]]:
            raise MalformedMessage(f"{place}[{len(before) - 1}]: not what an earlier event had there")
        return list(new)
    if len(before) + len(new) == told:
        before.extend(new)
        return before
    raise RowCountMismatch(
        f"{place}: {len(new)} after {len(before)}, of {told} completion tokens: neither all nor the new ones",
        before=len(before),
        now=len(new),
        completion_tokens=told,
    )
