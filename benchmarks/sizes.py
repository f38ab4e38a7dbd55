"""How much each benchmark moves."""

from __future__ import annotations

from dataclasses import dataclass

from arrow_tq import Field, fields

LAYERS, TOPK, EXPERTS = 40, 8, 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of one run of the benchmarks."""

    rounds: int
    pause_s: float
    """Before each turn: the engine makes memory ready ahead in quiet moments."""
    piece_tokens: int
    """Rows of one put; a row is 40 x 8 bytes."""
    pieces: int
    warm_pieces: int
    """What an engine has made ready ahead, and more: appends that meet no fresh page."""
    wire_pieces: int
    clients: int
    commits: int
    """Step commits per client and round."""
    shard_sessions: int
    """Of one batch, four turns each."""
    shard_turn_tokens: int
    shard_payload_tokens: int
    """Of a turn, where payload is to be moved."""
    shard_rounds: int
    shard_pause_s: float
    handles: int
    """Handles expanded, and grouped, in one call."""
    spans: int
    """Spans of one segment that is composed."""
    long_tokens: int
    """Of a trajectory with 96 KiB a token."""
    prompt_tokens: int
    train_steps: int
    """Of the training loop that replays routing."""
    touch_bytes: int
    """Fresh memory that is touched, to say what that costs here."""
    touch_away_s: float

    @property
    def piece_bytes(self) -> int:
        return self.piece_tokens * LAYERS * TOPK


FULL = Sizes(
    rounds=9,
    pause_s=1.2,
    piece_tokens=12_800,
    pieces=24,
    warm_pieces=7,
    wire_pieces=12,
    clients=64,
    commits=100,
    shard_sessions=64,
    shard_turn_tokens=16,
    shard_payload_tokens=512,
    shard_rounds=5,
    shard_pause_s=0.1,
    handles=10_000_000,
    spans=1_000_000,
    long_tokens=39_600,
    prompt_tokens=250,
    train_steps=5,
    touch_bytes=256 << 20,
    touch_away_s=3.0,
)
SMOKE = Sizes(
    rounds=1,
    pause_s=0.0,
    piece_tokens=64,
    pieces=3,
    warm_pieces=2,
    wire_pieces=2,
    clients=4,
    commits=5,
    shard_sessions=2,
    shard_turn_tokens=8,
    shard_payload_tokens=16,
    shard_rounds=1,
    shard_pause_s=0.0,
    handles=10_000,
    spans=1_000,
    long_tokens=240,
    prompt_tokens=240,
    train_steps=1,
    touch_bytes=1 << 20,
    touch_away_s=0.0,
)


def routing() -> Field:
    """40 layers, 8 of 256 experts a token, uint8: 320 bytes a token."""
    return fields.routed_experts(LAYERS, TOPK, EXPERTS)
