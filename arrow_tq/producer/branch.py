"""Where in its session's tree a step goes, as its producer says it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.names import ID_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Branch:
    """What ``session.step`` was told of a step's place."""

    parent: str | None
    retry_of: str | None
    tools: str | None
    extends: bool


def tools_name(tools: object) -> str:
    """A short name for what a model could call: equal for equal tools.

    Text of up to 256 bytes is its own name; all else is named by a hash of its JSON with sorted keys.

    Raises:
        InvalidInput: not JSON-safe.
    """
    if isinstance(tools, str) and 0 < len(tools.encode("utf-8", "surrogatepass")) <= ID_BYTES_MAX:
        return tools
    try:
        text = json.dumps(tools, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"tools: not JSON ({error})") from None
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()
