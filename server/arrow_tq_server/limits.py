"""What the operating system lets a server have."""

from __future__ import annotations

import resource

import structlog


def raise_open_files() -> None:
    """Take as many open files as the hard limit allows: extents, connections and streams each need one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    log = structlog.get_logger("arrow_tq.server")
    if soft == hard:
        log.info("open files", limit=soft)
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("open files: the limit stays", limit=soft, hard=hard, error=str(error))
        return
    log.info("open files: the limit was raised", limit=hard, before=soft)
