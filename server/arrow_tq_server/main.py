"""``arrow-tq serve``, and ``python -m arrow_tq_server``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arrow_tq.cli.serving import serve_with
from arrow_tq_server.config import load
from arrow_tq_server.process import run


def serve(
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory on disk: catalog and durable chunks.")
    ] = None,
    memory_dir: Annotated[Path | None, typer.Option(help="Directory in memory for other chunks.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Flight port; 0 picks a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of /livez, /readyz and /metrics.")] = None,
    capacity_bytes: Annotated[int | None, typer.Option(help="Payload bytes at most.")] = None,
    unix_socket: Annotated[Path | None, typer.Option(help="Unix socket for Flight, not a port.")] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="File with the tokens that are taken.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without tokens.", show_default=False)
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="CA of client certificates (PEM): mutual TLS.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="What this server does of a store: all, catalog or shard.")
    ] = None,
    join: Annotated[str | None, typer.Option(help="URL of the catalog that a shard joins.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the settings.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any further setting, as NAME=VALUE; may be repeated.")
    ] = None,
) -> None:
    """Serve a store over Arrow Flight until SIGTERM."""
    flags: dict[str, object] = {
        "data_dir": data_dir,
        "memory_dir": memory_dir,
        "host": host,
        "port": port,
        "http_port": http_port,
        "capacity_bytes": capacity_bytes,
        "unix_socket": unix_socket,
        "tokens_file": tokens_file,
        "insecure": insecure or None,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "role": role,
        "join": join,
        "log_level": log_level,
    }
    serve_with("serve", load, run, flags, setting, config)


def main() -> None:
    """The command line of ``python -m arrow_tq_server``."""
    typer.run(serve)
