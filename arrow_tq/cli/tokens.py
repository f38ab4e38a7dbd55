"""``arrow-tq token``: make bearer tokens for a server."""

from __future__ import annotations

from typing import Annotated

import typer

from arrow_tq.tokens import check_rights, new_token, token_line

app = typer.Typer(help="Make bearer tokens for a server.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command("new")
def new(
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help="A run that it covers; may be repeated. Every run when left out."),
    ] = None,
    may: Annotated[str, typer.Option(help="What it may do: read, write, admin, joined by commas.")] = "read",
    name: Annotated[str, typer.Option(help="Whose it is, for messages and logs.")] = "unnamed",
) -> None:
    """Print a new token, and the line of the server's token file that makes it known there.

    The token is shown once; the line holds its hash alone.
    """
    rights = check_rights(may)
    token = new_token()
    line = token_line(token, name, run or [], rights)
    typer.echo(token)
    typer.echo(line)
