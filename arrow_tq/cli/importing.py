"""``arrow-tq import``: chat trajectories from files into a store."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arrow_tq.cli.stores import StoreOption, open_store
from arrow_tq.cli.text import printable, size

if TYPE_CHECKING:
    from arrow_tq.importer.importing import ImportSummary
    from arrow_tq.importer.records import Record


class FileFormat(StrEnum):
    AUTO = "auto"
    MESSAGES = "messages"
    ATIF = "atif"


class OnError(StrEnum):
    SKIP = "skip"
    FAIL = "fail"


def import_files(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="JSON lines or ATIF, also .gz; or an export's folder."),
    ],
    store: StoreOption,
    run: Annotated[str, typer.Option(help="Run to import into.")] = "default",
    format: Annotated[FileFormat, typer.Option(help="auto looks at each record.")] = FileFormat.AUTO,
    on_error: Annotated[OnError, typer.Option(help="What a bad record does.")] = OnError.SKIP,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A tokenizers file; else one is trained.", show_default=False),
    ] = None,
    save_tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the tokenizer used.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Cut trajectories before the call that passes this.", show_default=False),
    ] = None,
    model: Annotated[
        bool, typer.Option("--model", help="Run a small random MoE model; store routing and log-probs.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights.")] = 0,
    group_key: Annotated[
        str | None, typer.Option(help="Key that holds the group.", show_default="task_id and the like")
    ] = None,
    session_key: Annotated[
        str | None, typer.Option(help="Key that holds the session id.", show_default="session_id, id, ...")
    ] = None,
    reward_key: Annotated[str, typer.Option(help="Key that holds the reward.")] = "reward",
) -> None:
    """Import chat trajectories (OpenAI messages or ATIF): a session each, a step a model call.

    A folder that arrow-tq export wrote is told by its content, and becomes what it was.
    """
    from arrow_tq.importer.importing import ImportPlan, import_trajectories
    from arrow_tq.importer.source import Source
    from arrow_tq.importer.trajectory import Keys

    usual = Keys()
    keys = Keys(
        session=usual.session if session_key is None else (session_key,),
        group=usual.group if group_key is None else (group_key,),
        reward=(reward_key,),
    )
    from arrow_tq.offline import import_export, is_export

    exports = [path for path in files if is_export(path)]
    if exports:
        if len(exports) < len(files):
            raise typer.BadParameter("exports and trajectory files are imported one kind at a time")
        with open_store(store, create=True) as opened:
            for path in exports:
                tell(import_export(opened, path, run), run)
        return
    plan = ImportPlan(run, on_error.value, tokenizer, save_tokenizer, max_tokens, model, seed)
    source = Source(tuple(files), format.value, keys)
    with open_store(store, create=True) as opened, TerminalWatcher() as watcher:
        summary = import_trajectories(opened, source, plan, watcher)
    tell(summary, run)


def tell(summary: ImportSummary, run: str) -> None:
    """The summary line on stdout, notes on stderr."""
    for note, count in summary.notes.items():
        typer.echo(f"note: {printable(note)} ({count} times)", err=True)
    parts = [
        f"{summary.sessions:,} sessions",
        f"{summary.steps:,} steps",
        f"{summary.segments:,} segments",
        f"{summary.tokens:,} tokens",
        size(summary.payload_bytes),
    ]
    line = f"imported into run {run}: {', '.join(parts)} in {summary.elapsed_s:.1f} s"
    if summary.existing:
        line += f"; {summary.existing:,} sessions were there already"
    if summary.bad:
        line += f"; {summary.bad:,} bad records skipped"
    typer.echo(line)


class TerminalWatcher:
    """A progress bar on stderr where that is a terminal; refused records as lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("starting", total=None)

    def phase(self, name: str, total_bytes: int) -> None:
        self._bar.reset(self._task, total=total_bytes, description=name)

    def record(self, record: Record) -> None:
        self._bar.update(self._task, completed=record.consumed_bytes)

    def problem(self, message: str) -> None:
        line = f"skipped: {printable(message)}"
        if self._bar.disable:
            typer.echo(line, err=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> TerminalWatcher:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
