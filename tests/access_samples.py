"""One command of every kind, made from its own declaration: also of kinds that are added later."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from arrow_tq_schemas.commands import Command, CommitSteps, StepCommit
from arrow_tq_schemas.ids import ChunkId

HEX = ChunkId.make(1, 0, 0, 1).hex
TEXTS = (HEX, "0" * 64, "0" * 16, "x")
"""Whatever a pattern wants: ids, digests."""
PLAIN: dict[str, object] = {"string": "x", "integer": 1, "number": 1.0, "boolean": False, "array": []}


def sample(kind: type[Command], run: str) -> Command:
    """A command of this kind about ``run``, where it is about one."""
    if kind is CommitSteps:
        return CommitSteps(steps=[StepCommit(run=run, epoch=0, session_id="s", step_id="1")])
    values = _required(kind)
    if "run" in kind.model_fields:
        values["run"] = run
    return kind(**values)


def _required(kind: type[BaseModel]) -> dict[str, Any]:
    schema: Any = kind.model_json_schema()
    return _object(schema, schema.get("$defs", {}))


def _object(schema: Any, defs: Any) -> dict[str, Any]:
    names = schema.get("required", [])
    return {name: _value(schema["properties"][name], defs) for name in names}


def _value(declared: Any, defs: Any) -> object:
    """A value that the field takes."""
    if "$ref" in declared:
        declared = defs[declared["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in declared:
        return _value(declared["anyOf"][0], defs)
    if "enum" in declared:
        return declared["enum"][0]
    if "const" in declared:
        return declared["const"]
    if "pattern" in declared:
        return next(one for one in TEXTS if re.fullmatch(declared["pattern"], one))
    if "properties" in declared:
        return _object(declared, defs)
    if "minimum" in declared:
        return declared["minimum"]
    return PLAIN.get(declared.get("type", "object"), {})
