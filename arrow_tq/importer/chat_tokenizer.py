"""Chat messages as token ids: a ``tokenizers`` file, or one trained on the input, with plain framing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from arrow_tq.importer.trajectory import Message, plain
from arrow_tq_schemas.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
TRAINED_VOCABULARY = 4096
TRAIN_CHARS_MAX = 16 << 20
"""How much of the input's text a tokenizer is trained on, in characters."""


class ChatTokenizer:
    """Turns messages into ids, message by message, so that a longer history never changes earlier ids.

    A message is ``<|im_start|>role``, a line break, its text, ``<|im_end|>`` and a line break. Where
    the vocabulary has the two marks they are one token each; marks inside a text are plain text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Text must not be able to forge the framing.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._start = self._mark(TURN_START)
        self._end = self._mark(TURN_END)
        self._break = self._encode("\n")
        self.vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint = xxhash.xxh3_64_hexdigest(tokenizer.to_str().encode())
        """Equal for tokenizers that give equal ids."""

    @classmethod
    def load(cls, path: Path) -> ChatTokenizer:
        """From a ``tokenizer.json``.

        Raises:
            InvalidInput: the file is missing or no tokenizer.
            Unsupported: the ``tokenizers`` package is not installed.
        """
        kind = _tokenizer_class()
        try:
            return cls(kind.from_file(str(path)))
        except Exception as error:
            # The library raises plain Exception for everything from a missing file to bad JSON.
            raise InvalidInput(f"{path}: not a tokenizers file ({error})", path=str(path)) from None

    @classmethod
    def train(cls, texts: Iterable[str]) -> ChatTokenizer:
        """A byte-level BPE over ``texts``: the same texts in the same order give the same ids."""
        kind = _tokenizer_class()
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = kind(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=TRAINED_VOCABULARY,
            special_tokens=[TURN_START, TURN_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    def save(self, path: Path) -> None:
        """Write a ``tokenizer.json``."""
        try:
            path.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}", path=str(path)) from None

    def context(self, messages: Iterable[Message]) -> list[int]:
        """Ids of whole messages that nobody sampled here."""
        ids: list[int] = []
        for message in messages:
            ids += self.opening(str(message["role"]))
            ids += self._encode(message_text(message))
            ids += self._end + self._break
        return ids

    def opening(self, role: str) -> list[int]:
        """Ids that come before a message's text; for an assistant, the end of the prompt."""
        return self._start + self._encode(plain(role)) + self._break

    def answer(self, message: Message) -> list[int]:
        """Ids that the model sampled: the message's text and the end mark."""
        return self._encode(message_text(message)) + self._end

    @property
    def line_break(self) -> list[int]:
        """Ids between an answer and the next message."""
        return self._break

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def _mark(self, text: str) -> list[int]:
        known = self._tokenizer.token_to_id(text)
        return self._encode(text) if known is None else [known]


def message_text(message: Message) -> str:
    """What of a message becomes tokens: reasoning, content, and tool calls as canonical JSON.

    Lone surrogates become U+FFFD; parts that are no text become their type in brackets.
    """
    parts: list[str] = []
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        parts.append(f"<think>\n{reasoning}\n</think>")
    content = message.get("content")
    if isinstance(content, str):
        parts.append(content)
    elif isinstance(content, list):
        parts.extend(_part_text(part) for part in content)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        parts.extend(_canonical(call.get("function", call)) for call in calls)
    return plain("\n".join(part for part in parts if part))


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"
    return _canonical(part)


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _tokenizer_class() -> type[Tokenizer]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Unsupported("tokenising needs the package tokenizers: pip install 'arrow-tq[demo]'") from None
    return Tokenizer
