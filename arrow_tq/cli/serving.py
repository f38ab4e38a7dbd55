"""What the commands that serve until SIGTERM do once their flags are known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from arrow_tq.settings import assigned
from arrow_tq_schemas.errors import ArrowTQError

Config = TypeVar("Config")


def serve_with(
    command: str,
    load: Callable[[Mapping[str, object], Path | None], Config],
    serve: Callable[[Config], int],
    flags: Mapping[str, object],
    setting: Sequence[str] | None,
    file: Path | None,
) -> None:
    """Load the settings and serve; ends the command with 2 for settings that do not fit, else as serving did.

    Args:
        command: its name, for messages.
        load: the settings in effect, from flags and a file.
        serve: serves, and gives an exit code.
        flags: values by setting name; None stands for "not given".
        setting: the values of ``--set``, which win over flags.
        file: TOML file with any of the settings.
    """
    try:
        config = load({**flags, **assigned(setting or ())}, file)
    except ArrowTQError as error:
        sys.stderr.write(f"arrow-tq {command}: {error.code}: {error.message}\n")
        raise typer.Exit(2) from None
    code = serve(config)
    if code:
        raise typer.Exit(code)
