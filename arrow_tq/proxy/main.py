"""``arrow-tq proxy``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arrow_tq.cli.serving import serve_with
from arrow_tq.proxy.config import load
from arrow_tq.proxy.process import run as serve


def proxy(
    upstream: Annotated[str | None, typer.Option(help="URL of the engine.")] = None,
    store: Annotated[str | None, typer.Option(help="URL of a store's server, or a folder.")] = None,
    run: Annotated[str | None, typer.Option(help="Run that sessions belong to.")] = None,
    engine: Annotated[str | None, typer.Option(help="sglang or vllm.")] = None,
    routing: Annotated[str | None, typer.Option(help="How expert ids come: payload or receipts.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.")] = None,
    on_store_failure: Annotated[
        str | None, typer.Option(help="Calls that cannot be recorded: fail or pass.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the settings.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any further setting, as NAME=VALUE; may be repeated.")
    ] = None,
) -> None:
    """Record what an engine samples and routes, between it and the agents, until SIGTERM."""
    flags: dict[str, object] = {
        "upstream": upstream,
        "store": store,
        "run": run,
        "engine": engine,
        "routing": routing,
        "host": host,
        "port": port,
        "on_store_failure": on_store_failure,
        "log_level": log_level,
    }
    serve_with("proxy", load, serve, flags, setting, config)
