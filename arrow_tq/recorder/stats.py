"""What a recorder counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Counters since the recorder was made, and gauges of now."""

    chunks: int = 0
    """Chunks stored, each layer group counted."""
    bytes: int = 0
    """Payload bytes of them."""
    waits: int = 0
    """Calls that had to wait because ``inflight_bytes_max`` were in flight."""
    waited_s: float = 0.0
    """How long the scheduler stood still for that, all waits together."""
    retries: int = 0
    """Writes tried again: the store was full or out of reach."""
    failed: int = 0
    """Writes given up; each fails its request at ``finish``."""
    in_flight_bytes: int = 0
    """Payload handed to the writers and not stored yet."""
    requests: int = 0
    """Requests begun and neither finished nor aborted."""
