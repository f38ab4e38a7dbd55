"""Entry point of ``arrow-tq``: the list of commands, and how errors end a process."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from arrow_tq.cli import capacity, exporting, importing, looking, running, tokens
from arrow_tq.cli.text import printable
from arrow_tq_schemas.errors import ArrowTQError

FAILED, INTERRUPTED = 1, 130

app = typer.Typer(
    name="arrow-tq",
    help="The trajectory store for agentic reinforcement learning, on Apache Arrow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from arrow_tq import __version__

        typer.echo(f"arrow-tq {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("serve", context_settings=running.PASS_ON, add_help_option=False)(running.serve)
app.command("proxy", context_settings=running.PASS_ON, add_help_option=False)(running.proxy)
app.command("demo")(running.demo)
app.command("import")(importing.import_files)
app.command("ls")(looking.list_things)
app.command("show")(looking.show)
app.command("sql")(looking.sql)
app.command("export")(exporting.export)
app.command("capacity")(capacity.capacity)
app.command("stats")(looking.stats)
app.command("bench", context_settings=running.PASS_ON, add_help_option=False)(running.bench)
app.add_typer(tokens.app, name="token")


def main() -> NoReturn:
    """Run the command of ``sys.argv``.

    Exit codes: 0 done, 1 an error (one line ``error [code]: message`` on stderr), 2 wrong usage,
    130 interrupted. ``ARROW_TQ_DEBUG=1`` shows tracebacks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end the command.
            stream.reconfigure(errors="replace")
    try:
        app()
    except ArrowTQError as error:
        _fail(error.code, error.message, error)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        # Whatever else goes wrong is told in one line as well.
        _fail("internal", f"{type(error).__name__}: {error} (ARROW_TQ_DEBUG=1 shows where)", error)
    raise SystemExit(0)


def _fail(code: str, message: str, error: Exception) -> NoReturn:
    if os.environ.get("ARROW_TQ_DEBUG") == "1":
        raise error
    line = " ".join(printable(message).split())
    typer.echo(f"error [{code}]: {line}", err=True)
    raise SystemExit(FAILED) from None
