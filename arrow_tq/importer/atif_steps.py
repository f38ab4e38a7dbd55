"""Records of ATIF, the Agent Trajectory Interchange Format, as chat messages with their token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from arrow_tq.importer.trajectory import (
    GivenTokens,
    Keys,
    Message,
    Trajectory,
    Turn,
    name_session,
    plain,
    read_reward,
    scalar_columns,
)
from arrow_tq_schemas.chunks import explain
from arrow_tq_schemas.errors import MalformedMessage, Unsupported

if TYPE_CHECKING:
    import atif

TOKEN_ID_MAX = 2**31 - 1


def parse_atif(record: Mapping[str, object], keys: Keys, fallback: str) -> Trajectory:
    """The trajectory of one ATIF document; each agent step that a model answered is a turn.

    Steps that were copied from an earlier trajectory, and agent steps without a model call, are context.
    Reward, group and session are looked for in the document, its ``extra`` and its
    ``final_metrics.extra``.

    Raises:
        MalformedMessage: not ATIF, or token ids that do not fit together; names the place.
        Unsupported: the ``atif`` package is not installed.
    """
    document = _validate(record)
    turns, trailing = _turns(document, record)
    if not turns:
        raise MalformedMessage(f"steps: none of {len(document.steps)} is an agent's model call")
    _check_tokens(turns)
    facts = _facts(document)
    session_id, group = name_session(facts, keys, fallback)
    columns, notes = scalar_columns(facts, keys.placed(facts))
    if document.subagent_trajectories:
        notes.append("embedded subagent trajectories are left out")
    return Trajectory(session_id, group, read_reward(facts, keys), turns, trailing, columns, notes)


def _validate(record: Mapping[str, object]) -> atif.Trajectory:
    try:
        from atif import Trajectory as Document
    except ImportError:
        raise Unsupported("ATIF files need the package atif: pip install 'arrow-tq[demo]'") from None
    try:
        # Validated without lone surrogates, which pydantic refuses; messages come from the record itself.
        return Document.model_validate(_scrub(record))
    except ValidationError as error:
        raise MalformedMessage(f"not ATIF: {explain(error)}") from None


def _scrub(value: object) -> object:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): _scrub(item) for key, item in value.items()}
    return value


def _facts(document: atif.Trajectory) -> dict[str, object]:
    """Everything scalar that is said of the whole trajectory, the outermost winning."""
    final = document.final_metrics
    return {
        **(final.extra or {} if final else {}),
        **(document.extra or {}),
        "session_id": document.trajectory_id or document.session_id,
        "agent": document.agent.name,
        "agent_version": document.agent.version,
        "model_name": document.agent.model_name,
    }


def _turns(document: atif.Trajectory, record: Mapping[str, object]) -> tuple[list[Turn], list[Message]]:
    raw_steps = cast("list[Message]", record["steps"])
    turns: list[Turn] = []
    new: list[Message] = []
    for step, raw in zip(document.steps, raw_steps, strict=True):
        new.append(_message(raw))
        called = step.source == "agent" and step.llm_call_count != 0 and not step.is_copied_context
        if called:
            turns.append(Turn(new, _given(step)))
            new = []
        new.extend(_observations(raw))
    return turns, new


def _message(raw: Message) -> Message:
    role = "assistant" if raw["source"] == "agent" else raw["source"]
    message: Message = {"role": role, "content": raw["message"]}
    if raw.get("reasoning_content") is not None:
        message["reasoning_content"] = raw["reasoning_content"]
    calls = raw.get("tool_calls")
    if calls:
        message["tool_calls"] = [_call(call) for call in cast("list[Message]", calls)]
    return message


def _call(call: Message) -> Message:
    arguments = json.dumps(call["arguments"], sort_keys=True)
    function = {"name": call["function_name"], "arguments": arguments}
    return {"id": call["tool_call_id"], "type": "function", "function": function}


def _observations(raw: Message) -> Iterator[Message]:
    observation = raw.get("observation")
    if not isinstance(observation, dict):
        return
    for result in observation["results"]:
        message: Message = {"role": "tool", "content": result.get("content")}
        if result.get("source_call_id") is not None:
            message["tool_call_id"] = result["source_call_id"]
        yield message


def _given(step: atif.Step) -> GivenTokens | None:
    metrics = step.metrics
    if metrics is None or (metrics.prompt_token_ids is None and metrics.completion_token_ids is None):
        return None
    where = f"steps[{step.step_id - 1}].metrics"
    if metrics.prompt_token_ids is None or metrics.completion_token_ids is None:
        raise MalformedMessage(f"{where}: prompt_token_ids and completion_token_ids go together")
    if step.llm_call_count is not None and step.llm_call_count > 1:
        raise MalformedMessage(f"{where}: token ids of {step.llm_call_count} model calls in one step")
    for name in ("prompt_token_ids", "completion_token_ids"):
        ids = getattr(metrics, name)
        if not ids:
            raise MalformedMessage(f"{where}.{name}: empty, where every call reads and samples something")
        if not 0 <= min(ids) <= max(ids) <= TOKEN_ID_MAX:
            raise MalformedMessage(f"{where}.{name}: {min(ids)} to {max(ids)}, expected 0 to {TOKEN_ID_MAX}")
    logprobs = metrics.logprobs
    if logprobs is not None and len(logprobs) != len(metrics.completion_token_ids):
        raise MalformedMessage(
            f"{where}: {len(logprobs)} logprobs for {len(metrics.completion_token_ids)} completion_token_ids"
        )
    if logprobs is not None and not all(math.isfinite(value) for value in logprobs):
        raise MalformedMessage(f"{where}.logprobs: not all are finite")
    return GivenTokens(metrics.prompt_token_ids, metrics.completion_token_ids, logprobs)


def _check_tokens(turns: list[Turn]) -> None:
    """All turns have token ids or none: ids of two vocabularies must not meet in one session."""
    without = [index for index, turn in enumerate(turns) if turn.given is None]
    if without and len(without) != len(turns):
        raise MalformedMessage(
            f"model call {without[0]} has no token ids and {len(turns) - len(without)} others have: "
            "expected all or none"
        )
