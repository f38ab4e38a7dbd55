"""Where the library's log lines go.

An application that configured structlog (as our server does) gets them there. Otherwise they go to the
standard ``logging`` under ``arrow_tq.*``, so that a library never prints on its own.
"""

from __future__ import annotations

import logging

import structlog
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
