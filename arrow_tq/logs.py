"""Where the library's log lines go.

An application that configured structlog (as our server does) gets them there. Otherwise they go to the
standard ``logging`` under ``arrow_tq.*``, so that a library never prints on its own.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import FilteringBoundLogger


def logger(name: str) -> FilteringBoundLogger:
    """A structured logger; call it when it is needed, not at import."""
    if structlog.is_configured():
        bound: FilteringBoundLogger = structlog.get_logger(name)
        return bound
    plain: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
    )
    return plain


def log_json(level: str) -> None:
    """Make this process log as JSON lines on standard error; ``level`` is the least that is logged."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # Not the standard formatter: sys.tracebacklimit, the server's backstop, would empty its
            # tracebacks. Without locals: they hold the bodies of agents' calls.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
