"""Commands that look into a store: ls, show, sql, stats."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from arrow_tq.cli.stores import RunOption, StoreOption, open_store

if TYPE_CHECKING:
    import pyarrow as pa


class TableFormat(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


FormatOption = Annotated[TableFormat, typer.Option("--format", help="How the rows are written.")]
LimitOption = Annotated[int, typer.Option(min=1, max=100_000, help="Rows at most, the newest.")]

_RUNS = """
SELECT run, durability, epoch, sessions, segments, tokens, created_at
FROM runs
LEFT JOIN (SELECT run, count(*) AS sessions FROM sessions GROUP BY run) USING (run)
LEFT JOIN (SELECT run, count(*) AS segments, sum(num_tokens)::BIGINT AS tokens
           FROM segments GROUP BY run) USING (run)
ORDER BY created_at
"""
_SESSIONS = """
SELECT session_id, any_value(s.group_id) AS group_id, any_value(s.status) AS status,
       any_value(s.steps) AS steps, count(segment_id) AS segments, sum(num_tokens)::BIGINT AS tokens,
       avg(reward) AS reward, any_value(s.created_at) AS created_at
FROM sessions s LEFT JOIN segments USING (run, session_id)
GROUP BY session_id ORDER BY created_at DESC LIMIT {limit}
"""
_SEGMENTS = """
SELECT segment_id, group_id, view, status, num_tokens, loss_tokens, reward, finish_reason, complete_fields
FROM segments ORDER BY created_at DESC LIMIT {limit}
"""
_CLAIMS = """
SELECT claim_id, task, view, segments, state, world, released_ranks, lease_s,
       CASE WHEN state = 'active' THEN expires_at END AS lease_ends, created_at
FROM claims ORDER BY created_at DESC LIMIT {limit}
"""
_MARKS = """
SELECT mark, status, reason, epoch, policy_version, kept_segments, created_at
FROM marks ORDER BY created_at DESC LIMIT {limit}
"""


def list_things(
    store: StoreOption,
    run: Annotated[
        str | None, typer.Argument(help="A run, to list its sessions.", show_default=False)
    ] = None,
    segments: Annotated[bool, typer.Option("--segments", help="The run's segments.")] = False,
    claims: Annotated[bool, typer.Option("--claims", help="The run's claims and their leases.")] = False,
    marks: Annotated[bool, typer.Option("--marks", help="The run's marks and what they keep.")] = False,
    limit: LimitOption = 50,
    format: FormatOption = TableFormat.TABLE,
) -> None:
    """List the runs, or a run's sessions, segments, claims or marks."""
    chosen = {"--segments": segments, "--claims": claims, "--marks": marks}
    asked = [name for name, wanted in chosen.items() if wanted]
    if len(asked) > 1:
        raise typer.BadParameter(f"give one of {', '.join(asked)}")
    if run is None and asked:
        raise typer.BadParameter(f"{asked[0]} needs a run: arrow-tq ls RUN {asked[0]}")
    with open_store(store) as opened:
        if run is None:
            _print(opened.sql(_RUNS), format)
            return
        # An unknown run is an error, not an empty list.
        opened.run(run)
        queries = {"--segments": _SEGMENTS, "--claims": _CLAIMS, "--marks": _MARKS}
        query = queries[asked[0]] if asked else _SESSIONS
        _print(opened.sql(query.format(limit=limit), run=run), format)


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="DuckDB SQL; - reads it from stdin.")],
    store: StoreOption,
    run: RunOption = None,
    format: FormatOption = TableFormat.TABLE,
) -> None:
    """Ask in SQL: what rollouts, payload and trainers did, as tables.

    These are runs, sessions, steps, segments, spans, chunks, blobs, step_blobs, bundles, claims and marks.
    """
    text = sys.stdin.read() if query == "-" else query
    with open_store(store) as opened:
        _print(opened.sql(text, run=run), format)


def stats(store: StoreOption, format: FormatOption = TableFormat.TABLE) -> None:
    """Counters and gauges of the store, and how full it is."""
    import pyarrow as pa

    with open_store(store) as opened:
        values: dict[str, float] = {**opened.pressure().model_dump(), **opened.stats()}
    # The table carries numbers as text, so that counters are not shown as 1e+09.
    shown = [f"{value:g}" if value != int(value) else str(int(value)) for value in values.values()]
    if format is TableFormat.JSON:
        _print(pa.table({name: [value] for name, value in values.items()}), format)
    else:
        _print(pa.table({"name": list(values), "value": shown}), format)


def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="A session or segment.")],
    store: StoreOption,
    run: RunOption = None,
    full: Annotated[bool, typer.Option("--full", help="Whole messages, all spans.")] = False,
) -> None:
    """Show a session or segment: its metadata, its steps with their messages, its spans."""
    from arrow_tq.cli.detail import Detail

    with open_store(store) as opened:
        Detail.load(opened, id, run).print(full=full)


def _print(table: pa.Table, format: TableFormat) -> None:
    from arrow_tq.sql_format import format_table

    format_table(table, sys.stdout, format.value)
