"""Records of OpenAI chat messages: ``{"messages": [...], "reward": 1.0, "task_id": 7, "trial": 0}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from arrow_tq.importer.trajectory import (
    Keys,
    Message,
    Trajectory,
    Turn,
    name_session,
    read_reward,
    scalar_columns,
)
from arrow_tq_schemas.errors import MalformedMessage


def parse_messages(record: Mapping[str, object], keys: Keys, fallback: str) -> Trajectory:
    """The trajectory of one record; each assistant message is a turn.

    Args:
        record: the record's JSON object.
        keys: where its reward, group and session are.
        fallback: names the session where no key does.

    Raises:
        MalformedMessage: names the key, the message's index and what was expected.
    """
    messages = check_messages(record.get("messages"))
    session_id, group = name_session(record, keys, fallback)
    turns, trailing = split_turns(messages)
    if not turns:
        raise MalformedMessage(f"messages: none of {len(messages)} is by the assistant")
    columns, notes = scalar_columns(record, keys.placed(record))
    return Trajectory(session_id, group, read_reward(record, keys), turns, trailing, columns, notes)


def split_turns(messages: list[Message]) -> tuple[list[Turn], list[Message]]:
    """Turns that each end with an assistant message, and what comes after the last."""
    turns: list[Turn] = []
    new: list[Message] = []
    for message in messages:
        new.append(message)
        if message["role"] == "assistant":
            turns.append(Turn(new))
            new = []
    return turns, new


def check_messages(value: object) -> list[Message]:
    """``value`` as a list of chat messages. Raises ``MalformedMessage`` naming index and key."""
    if value is None:
        raise MalformedMessage("messages: missing")
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else type(value).__name__
        raise MalformedMessage(f"messages: expected a list of messages, got {what}")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise MalformedMessage(f"messages[{index}]: expected an object, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise MalformedMessage(f"messages[{index}].role: expected text, got {role!r}")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            kind = type(content).__name__
            raise MalformedMessage(f"messages[{index}].content: expected text, parts or null, got {kind}")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(c, dict) for c in calls)):
            raise MalformedMessage(f"messages[{index}].tool_calls: expected a list of objects")
    return cast("list[Message]", value)
