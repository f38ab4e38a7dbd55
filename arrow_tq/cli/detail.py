"""Everything about one session or segment, for ``arrow-tq show``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arrow_tq.cli.text import clip, printable, quote
from arrow_tq_schemas.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

    from arrow_tq.interface import Store

Row = Mapping[str, object]

MESSAGE_CHARS = 400
SPANS_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Detail:
    """A session with its steps and the segments asked for."""

    run: str
    session: Row
    segments: Sequence[Row]
    steps: Sequence[Row]
    spans: pa.Table

    @classmethod
    def load(cls, store: Store, id: str, run: str | None) -> Detail:
        """The session or segment called ``id``.

        Raises:
            NotFound: nothing is called so.
            InvalidInput: several runs have one, and ``run`` is None.
        """
        literal = quote(id)
        either = f"session_id = {literal} OR session_id IN (SELECT session_id FROM segments"
        found = store.sql(
            f"SELECT * FROM sessions WHERE {either} WHERE segment_id = {literal})", run=run
        ).to_pylist()
        if not found:
            raise NotFound(f"{id!r}: no session or segment is called so", id=id)
        if len(found) > 1:
            runs = ", ".join(sorted(str(row["run"]) for row in found))
            raise InvalidInput(f"{id!r} is in several runs ({runs}): name one with --run", id=id)
        session = found[0]
        name, of_run = quote(str(session["session_id"])), str(session["run"])
        which = f"session_id = {name}" if id == session["session_id"] else f"segment_id = {literal}"
        segments = store.sql(
            f"SELECT * FROM segments WHERE {which} ORDER BY view, segment_index", run=of_run
        ).to_pylist()
        steps = store.sql(f"SELECT * FROM steps WHERE session_id = {name} ORDER BY step_index", run=of_run)
        spans = store.sql(
            "SELECT segment_id, field, start, rows, chunk_id, first_row FROM spans JOIN segments USING"
            f" (segment_id) WHERE {which} ORDER BY segment_id, field, start",
            run=of_run,
        )
        return cls(of_run, session, segments, steps.to_pylist(), spans)

    def print(self, *, full: bool) -> None:
        """Write it to stdout; messages and spans are shortened unless ``full``."""
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        _print_row(console, f"session {self.session['session_id']}", self.session)
        for segment in self.segments:
            _print_row(console, f"segment {segment['segment_id']}", segment)
        for step in self.steps:
            self._print_step(console, step, None if full else MESSAGE_CHARS)
        self._print_spans(console, None if full else SPANS_SHOWN)

    def _print_step(self, console: Console, step: Row, characters: int | None) -> None:
        facts = [f"step {step['step_id']}", f"{step['num_tokens']} tokens"]
        if step["sampled_start"] is not None:
            facts.append(f"sampled [{step['sampled_start']}, {step['sampled_end']})")
        if step["version"] is not None:
            facts.append(f"version {step['version']}")
        if step["rewrite_at"] is not None:
            facts.append(f"rewrites history from {step['rewrite_at']}")
        _print_title(console, ", ".join(facts))
        for message in json.loads(str(step["messages"])):
            role, text = _message(message)
            console.print(f"[{role}] {clip(text, characters)}", markup=False)

    def _print_spans(self, console: Console, count: int | None) -> None:
        from arrow_tq.sql_format import format_table

        shown = self.spans if count is None else self.spans.slice(0, count)
        more = f" ({shown.num_rows} shown, --full shows all)" if shown.num_rows < self.spans.num_rows else ""
        _print_title(console, f"{self.spans.num_rows} spans{more}")
        format_table(shown, sys.stdout, "table")


def _print_title(console: Console, text: str) -> None:
    console.print()
    console.print(printable(text), markup=False, style="bold")


def _print_row(console: Console, title: str, row: Row) -> None:
    _print_title(console, title)
    for name, value in row.items():
        if value is not None:
            console.print(f"  {printable(name)}: {printable(clip(str(value), MESSAGE_CHARS))}", markup=False)


def _message(message: object) -> tuple[str, str]:
    """``(role, text)`` of a chat message, for the terminal."""
    if not isinstance(message, Mapping):
        return "?", printable(json.dumps(message))
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [] if content is None else [json.dumps(content)]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        parts += [json.dumps(call, ensure_ascii=False) for call in calls]
    return printable(str(message.get("role", "?"))), printable("\n".join(part for part in parts if part))
