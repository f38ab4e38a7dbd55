"""Which store a command works on."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arrow_tq.tokens import TOKEN_VARIABLE
from arrow_tq_schemas.errors import NotFound, StoreInUse

if TYPE_CHECKING:
    from arrow_tq.interface import Store

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="ARROW_TQ_STORE",
        metavar="PATH-or-URL",
        help="A store's folder, or the URL of a server (grpc://host:port).",
        show_default=False,
    ),
]
RunOption = Annotated[
    str | None, typer.Option("--run", help="One run's rows only; all runs when left out.", show_default=False)
]


@contextmanager
def open_store(place: str, *, create: bool = False) -> Iterator[Store]:
    """The store at a path or URL; a folder that a server holds is reached through that server.

    ``ARROW_TQ_TOKEN`` and ``ARROW_TQ_TLS_...`` are what a server is shown.

    Args:
        place: folder or URL.
        create: whether a folder that is no store yet becomes one.

    Raises:
        NotFound: no store there, and not ``create``.
        StoreInUse: another process that is no server has the folder open.
    """
    import arrow_tq

    log_to_stderr()
    if "://" in place:
        store = _connect(place)
    else:
        if not create and not _is_store(Path(place)):
            raise NotFound(f"{place}: no store here (arrow-tq import or serve makes one)", path=place)
        try:
            store = arrow_tq.open(place)
        except StoreInUse as error:
            url = error.details.get("url")
            if not isinstance(url, str) or not url:
                raise
            store = _connect(url)
    with store:
        yield store


def _connect(url: str) -> Store:
    """A server, with the token and the TLS files that the environment names."""
    import arrow_tq
    from arrow_tq.client import Tls

    tls = Tls.from_environment() if url.startswith("grpc+tls:") else None
    return arrow_tq.connect(url, os.environ.get(TOKEN_VARIABLE) or None, tls=tls)


def log_to_stderr() -> None:
    """Keep the store's log off stdout, which is the command's answer; warnings and worse on stderr."""
    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def _is_store(path: Path) -> bool:
    from arrow_tq.store.directory import NOTE_NAME

    return (path / NOTE_NAME).is_file()
