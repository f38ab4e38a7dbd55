"""Small steps that every front shares: asking a backend, reading tables, naming segments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from arrow_tq.backend import Backend
from arrow_tq_schemas.chunks import explain
from arrow_tq_schemas.commands import Command, SegmentInfo, Wire
from arrow_tq_schemas.errors import InternalError, InvalidInput

Body = TypeVar("Body", bound=Wire)
Ids = str | SegmentInfo | Iterable[str | SegmentInfo]
"""Segment ids, or session ids, which stand for all their segments; one alone stands for a list."""


def ask(backend: Backend, command: Command, kind: type[Body]) -> Body:
    """The reply's body, which must be a ``kind``."""
    body = backend.execute(command).body
    if not isinstance(body, kind):
        raise InternalError(f"reply to {command.verb}: {type(body).__name__}, expected {kind.__name__}")
    return body


@contextmanager
def checked(what: str) -> Iterator[None]:
    """Builds a command: a value that does not fit it is the caller's mistake, named as such."""
    try:
        yield
    except ValidationError as error:
        raise InvalidInput(f"{what}: {explain(error)}") from None


def read_table(blob: bytes) -> pa.Table:
    """The table in an Arrow IPC stream."""
    return pa.ipc.open_stream(pa.py_buffer(blob)).read_all()


def write_table(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def columns_json(columns: Mapping[str, object]) -> str:
    """User columns as JSON text, ASCII; numpy scalars as the numbers they are.

    Raises:
        InvalidInput: a value JSON cannot carry, naming its column.
    """
    plain: dict[str, object] = {}
    for name, value in columns.items():
        plain[name] = value.item() if isinstance(value, np.generic) else value
        try:
            json.dumps(plain[name], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"column {name!r}: {value!r} is not JSON ({error})", column=name) from None
    return json.dumps(plain)


def messages_json(messages: Iterable[object]) -> str:
    """Messages as a JSON array, ASCII: lone surrogates stay as their escapes.

    Raises:
        InvalidInput: not JSON; names the message's index.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidInput(f"messages: expected a list of messages, got {type(messages).__name__}")
    parts = []
    for index, message in enumerate(messages):
        try:
            parts.append(json.dumps(message))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"messages[{index}]: not JSON ({error})", index=index) from None
    return f"[{', '.join(parts)}]"


def segment_ids(ids: Ids) -> list[str]:
    """Plain ids from ids or from the segments that ``finalize`` returned."""
    if isinstance(ids, str | SegmentInfo):
        ids = [ids]
    names = [item.segment_id if isinstance(item, SegmentInfo) else item for item in ids]
    for name in names:
        if not isinstance(name, str):
            raise InvalidInput(f"id {name!r}: expected a segment or session id")
    return names
