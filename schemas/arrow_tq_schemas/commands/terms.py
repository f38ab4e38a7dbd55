"""Words that several commands use."""

from __future__ import annotations

from typing import Literal

View = Literal["lineage", "timeline"]
Durability = Literal["process", "disk"]
Names = list[str]
Json = str
"""JSON text of user columns (an object) or messages (an array), ASCII: lone surrogates stay escaped."""
