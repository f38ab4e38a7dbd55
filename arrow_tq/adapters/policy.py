"""The row rule, the deviations from it that a caller may declare, and where rows belong under each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from arrow_tq_schemas.errors import InvalidInput, RowCountMismatch

PAST_STOP_ROWS_MAX = 64
"""Rows past the stop token at most: what one round of speculative decoding can accept."""
IDENTICAL_ROWS_MAX = 64
"""A longer run of equal rows, over all layers, is taken for a stale buffer."""


class RowRule(Enum):
    """Which rows the engine sends for a call of T tokens that asked for routing from position ``s``.

    Row ``i`` belongs to the forward pass that consumed token ``i``; the last sampled token is never
    forwarded, so the rows are those of positions ``[s, T - 1)``. Every other rule also takes exactly that
    count, and one more that the caller knows this server to send.
    """

    EXACT = "exact"
    """``[s, T - 1)`` and nothing else."""
    STOP_EDGE = "stop-edge"
    """One row too many, ``[s, T)``: the last is dropped."""
    PREFILL_ONLY = "prefill-only"
    """One row too few, ``[s, T - 2)``: position T - 2 is a hole until a later call covers it."""
    PAST_STOP = "past-stop"
    """Up to ``PAST_STOP_ROWS_MAX`` rows past T - 1, of tokens that were cut off: they are dropped."""
    IGNORES_START = "ignores-start"
    """``[0, T - 1)`` whatever was asked: the rows before ``s`` are dropped."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a caller declares of the engine it talks to.

    Args:
        rule: which rows come.
        identical_rows_max: how long a run of equal rows, over all layers, may be before it is refused as
            stale; None where it is not checked.
    """

    rule: RowRule = RowRule.EXACT
    identical_rows_max: int | None = IDENTICAL_ROWS_MAX

    def __post_init__(self) -> None:
        if not isinstance(self.rule, RowRule):
            raise InvalidInput(f"rule {self.rule!r}: expected a RowRule")
        limit = self.identical_rows_max
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidInput(f"identical_rows_max {limit!r}: expected a positive integer or None")


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens of one call, and from where its routing was asked for."""

    prompt_tokens: int
    completion_tokens: int
    start: int = 0
    """First position whose row was asked for."""

    def __post_init__(self) -> None:
        for label in ("prompt_tokens", "start"):
            value = getattr(self, label)
            if type(value) is not int or value < 0:
                raise InvalidInput(f"{label} {value!r}: expected an integer from 0 up")
        if self.start > self.prompt_tokens:
            raise InvalidInput(f"start {self.start}: at most the {self.prompt_tokens} prompt tokens")

    @property
    def tokens(self) -> int:
        """T: prompt and completion."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def rows(self) -> int:
        """How many rows the row rule gives."""
        return max(0, self.tokens - 1 - self.start)

    @property
    def all_rows(self) -> int:
        """How many it gives from position 0."""
        return max(0, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which of the rows that came are kept; the first of them belongs to the window's start."""

    skip: int
    keep: int


def place(name: str, rows: int, window: Window, rule: RowRule) -> Placement:
    """Where ``rows`` rows of field ``name`` belong.

    Raises:
        RowCountMismatch: the rule does not know this count; names both counts and what the count looks like.
    """
    expected = window.rows
    if rows == expected:
        return Placement(0, rows)
    if rule is RowRule.STOP_EDGE and rows == expected + 1:
        return Placement(0, expected)
    if rule is RowRule.PREFILL_ONLY and rows == expected - 1:
        return Placement(0, rows)
    if rule is RowRule.PAST_STOP and expected < rows <= expected + PAST_STOP_ROWS_MAX:
        return Placement(0, expected)
    if rule is RowRule.IGNORES_START and rows == window.all_rows:
        return Placement(rows - expected, expected)
    hints = _looks_like(rows, window)
    raise RowCountMismatch(
        f"field {name!r}: {rows} rows, expected {expected}: rule {rule.value!r} has rows for positions "
        f"[{window.start}, {window.start + expected}) of {window.prompt_tokens} prompt and "
        f"{window.completion_tokens} completion tokens, since the last token is never forwarded"
        + (f"; {rows} would be {' or '.join(hints)}" if hints else ""),
        field=name,
        rule=rule.value,
        rows=rows,
        expected=expected,
        prompt_tokens=window.prompt_tokens,
        completion_tokens=window.completion_tokens,
        start=window.start,
    )


def _looks_like(rows: int, window: Window) -> list[str]:
    """The known deviations that this count fits, for people to choose from: never chosen here."""
    expected, hints = window.rows, []
    if rows == expected + 1:
        hints.append("one a token, as at a stop edge (RowRule.STOP_EDGE)")
    if rows == expected - 1:
        hints.append("T - 2, as after a prefill-only call (RowRule.PREFILL_ONLY)")
    if window.start and rows == window.all_rows:
        hints.append(f"all from position 0, start {window.start} ignored (RowRule.IGNORES_START)")
    if expected + 1 < rows <= expected + PAST_STOP_ROWS_MAX:
        hints.append("rows past the stop token, as under speculative decoding (RowRule.PAST_STOP)")
    generated = window.completion_tokens
    if window.start < window.prompt_tokens and generated > 1 and rows in (generated - 1, generated):
        hints.append("the generated tokens alone, without the prompt's half")
    return hints
