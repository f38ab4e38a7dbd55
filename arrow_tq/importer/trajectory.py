"""A trajectory as the importer sees it, whatever file format it came in."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage
from arrow_tq_schemas.names import check_id, check_identifier, check_session
from arrow_tq_schemas.tables import RESERVED_COLUMNS

Message = dict[str, object]

FLOAT_MAX = sys.float_info.max
INT_MAX = 2**63 - 1
_TAKEN = RESERVED_COLUMNS | {
    # columns that the importer adds
    *("tokenizer", "trailing_messages", "truncated"),
    # parameters of ``run.session`` and ``session.finalize``
    *("self", "id", "group", "tasks", "ttl_s", "wait_s", "view"),
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Token ids of one model call, recorded by the engine."""

    prompt: list[int]
    """The whole prompt, from position 0."""
    completion: list[int]
    logprobs: list[float] | None
    """One a completion token."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: what was new since the call before, and the answer."""

    messages: list[Message]
    """New messages; the last is the assistant's."""
    given: GivenTokens | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout."""

    session_id: str
    group: str | None
    reward: float | None
    turns: list[Turn]
    trailing: list[Message] = field(default_factory=list)
    """Messages after the last answer (a final user message or tool result)."""
    columns: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the file had and the store will not have."""

    @property
    def has_tokens(self) -> bool:
        """Whether the file says the token ids, so that nothing needs a tokenizer."""
        return self.turns[0].given is not None


@dataclass(frozen=True, slots=True)
class Keys:
    """Which keys of a record say what; tried in order."""

    session: Sequence[str] = ("session_id", "trajectory_id", "rollout_id", "id")
    group: Sequence[str] = ("group", "group_id", "task_id", "prompt_id", "instance_id")
    sample: Sequence[str] = ("trial", "sample", "sample_id", "attempt", "rollout")
    """Tell the samples of a group apart where there is no session key."""
    reward: Sequence[str] = ("reward",)

    def placed(self, record: Mapping[str, object]) -> frozenset[str]:
        """Keys of ``record`` that have a place of their own and are no columns.

        A group or sample key stays a column too (``task_id`` as the number it is), unless it is text.
        """
        group = _first(record, self.group)
        own = [_first(record, self.session), _first(record, self.reward), "messages"]
        own.append(group if group is not None and isinstance(record[group], str) else None)
        return frozenset(key for key in own if key is not None)


def plain(text: str) -> str:
    """``text`` with each lone surrogate replaced by U+FFFD: what UTF-8 can carry."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def name_session(record: Mapping[str, object], keys: Keys, fallback: str) -> tuple[str, str | None]:
    """``(session id, group)`` of a record.

    ``{"task_id": 3, "trial": 1}`` is session ``task-3/trial-1`` of group ``task-3``; with neither a
    session key nor a sample key the session is called by ``fallback``.

    Raises:
        MalformedMessage: an id that cannot be one; names the key.
    """
    group = _label(record, keys.group)
    session = _label(record, keys.session)
    if session is None:
        sample = _label(record, keys.sample)
        session = "/".join(part for part in (group, sample or fallback) if part is not None)
    try:
        return check_session(session), None if group is None else check_id(group, "group")
    except ArrowTQError as error:
        raise MalformedMessage(error.message) from None


def _label(record: Mapping[str, object], keys: Sequence[str]) -> str | None:
    key = _first(record, keys)
    if key is None:
        return None
    value = record[key]
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{key.removesuffix('_id')}-{value}"
    raise MalformedMessage(f"{key}: expected text or an integer, got {type(value).__name__}")


def _first(record: Mapping[str, object], keys: Sequence[str]) -> str | None:
    """The first of ``keys`` that the record has a value for."""
    return next((key for key in keys if record.get(key) not in (None, "")), None)


def read_reward(record: Mapping[str, object], keys: Keys) -> float | None:
    """The record's reward, None where it has none.

    Raises:
        MalformedMessage: not a finite number.
    """
    key = _first(record, keys.reward)
    if key is None:
        return None
    value = record[key]
    if not isinstance(value, int | float) or not abs(value) <= FLOAT_MAX:
        raise MalformedMessage(f"{key}: expected a finite number, got {str(value)[:80]!r}")
    return float(value)


def scalar_columns(record: Mapping[str, object], skip: frozenset[str]) -> tuple[dict[str, object], list[str]]:
    """The record's other scalar keys as user columns, and notes on what could not be one."""
    columns: dict[str, object] = {}
    notes: list[str] = []
    for key, value in record.items():
        if key in skip or value is None:
            continue
        if not isinstance(value, str | int | float):
            notes.append(f"key {key!r} is no scalar and is left out")
            continue
        if not isinstance(value, str) and not abs(value) <= (
            FLOAT_MAX if isinstance(value, float) else INT_MAX
        ):
            notes.append(f"key {key!r} has a number no column can hold and is left out there")
            continue
        name = f"{key}_" if key in _TAKEN else key
        if name != key:
            notes.append(f"key {key!r} is column {name!r}: the name is taken")
        try:
            columns[check_identifier(name, "column")] = plain(value) if isinstance(value, str) else value
        except ArrowTQError:
            notes.append(f"key {key!r} cannot name a column and is left out")
    return columns, notes
