"""What every recorded route has in common."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol as Interface

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters import EngineOutput, Policy
from arrow_tq.proxy.document import Document, Shape
from arrow_tq.proxy.tree import Tokens
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage, RowCountMismatch, Unsupported
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.receipts import Receipt

ROUTED, INDEXER = "routed_experts", "indexer_topk"
RECEIPTS = "arrow_tq_receipts"
"""Where an engine with a recorder puts its receipts: a list, each JSON text or an object."""
REFERENCE = "arrow_tq"
"""Where an answer says what was stored of it."""
REQUEST = Shape()
TOKEN_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a request is about."""

    tokens: Tokens | None
    """``[prompt]``; None where the engine makes them."""
    messages: Sequence[object] | None
    """The whole history of a chat; None for other routes."""
    tools: object
    stream: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """What an engine is asked for, beyond what the agent asks for."""

    fields: frozenset[str]
    """Fields whose rows come in the response, by the adapters' names."""
    start: int
    """First position whose routing is wanted."""


@dataclass(slots=True, eq=False)
class Found:
    """What the answers of one call held, put together."""

    response: dict[str, object] = field(default_factory=dict)
    """What ``decode`` takes."""
    prompt: Tokens | None = None
    receipts: list[Receipt] = field(default_factory=list)
    reply: object = None
    """The assistant's message, of a whole chat answer."""
    finished: bool = False


class Answer(Interface):
    """One call's answers: a whole one, or the events of a stream."""

    @property
    def found(self) -> Found: ...

    @property
    def asked(self) -> int:
        """The start that the engine was asked for: that of the call, or of the agent itself."""
        ...

    def take(self, document: Document) -> bytes:
        """Collect what was asked for, and give the text without what the agent did not ask for.

        Raises:
            MalformedMessage, RowCountMismatch: the engine's answer is not of its form.
        """
        ...

    def decode(
        self, fields: Mapping[str, Field], prompt_tokens: int, start: int, policy: Policy
    ) -> EngineOutput:
        """The rows; errors as the adapters raise them."""
        ...

    def release(self) -> None:
        """Let go of the payload, which was decoded; receipts and the prompt stay."""
        ...


class Protocol(Interface):
    """One route."""

    shape: Shape
    streams: frozenset[str]
    """Fields whose rows come in streamed answers too."""
    streams_tokens: bool
    """Whether streamed answers have token ids."""

    def read(self, request: Document) -> Prompt:
        """What the request is about.

        Raises:
            InvalidInput: it is not of the route's form.
            Unsupported: it asks for several completions at once.
        """
        ...

    def ask(self, request: Document, ask: Ask, stream: bool) -> bytes:
        """The request with what is asked for in addition."""
        ...

    def answer(self, request: Document, ask: Ask) -> Answer:
        """A collector for the answers to it."""
        ...


def token_ids(value: object, place: str) -> Tokens:
    """``[n]`` token ids from a list of JSON numbers.

    Raises:
        InvalidInput: anything else.
    """
    if isinstance(value, list):
        try:
            ids: npt.NDArray[np.generic] = np.asarray(value)
        except (ValueError, OverflowError):
            ids = np.empty(0, np.float64)
        if not value:
            return np.empty(0, np.int32)
        if ids.ndim == 1 and ids.dtype.kind == "i" and ids.min() >= 0 and ids.max() <= TOKEN_MAX:
            return ids.astype(np.int32)
    raise InvalidInput(f"{place}: expected a list of token ids")


def one_completion(count: object, place: str) -> None:
    """Raises ``Unsupported`` where a call asks for several completions."""
    if count not in (None, 1):
        raise Unsupported(
            f"{place} {count!r}: a call that is recorded samples one completion; send several calls with the "
            "same x-arrow-tq-parent",
        )


def receipts_of(value: object, place: str) -> list[Receipt]:
    """Receipts as an engine with a recorder sends them.

    Raises:
        MalformedMessage: they are none.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise MalformedMessage(f"{place}: expected a list of receipts")
    return [Receipt.from_json(one if isinstance(one, str) else json.dumps(one)) for one in value]


def later_rows(text: str, skip: int, rows: int) -> str:
    """A payload in base64 without its first ``skip`` of ``rows`` rows, in the same form.

    Raises:
        MalformedMessage, RowCountMismatch: it cannot be cut so.
    """
    try:
        raw = base64.b64decode(text, validate=True)
        if raw.startswith(b"\x93NUMPY"):
            whole = np.load(io.BytesIO(raw), allow_pickle=False)
            file = io.BytesIO()
            np.save(file, whole[skip:])
            return base64.b64encode(file.getvalue()).decode("ascii")
    except ValueError as error:
        raise MalformedMessage(f"routing: {error}") from None
    if rows <= 0 or len(raw) % rows:
        raise RowCountMismatch(f"routing: {len(raw)} bytes are no {rows} rows", rows=rows, bytes=len(raw))
    return base64.b64encode(raw[skip * (len(raw) // rows) :]).decode("ascii")


def number(value: object, default: int = 0) -> int:
    """An integer from 0 up, or the default."""
    return value if type(value) is int and value >= 0 else default
