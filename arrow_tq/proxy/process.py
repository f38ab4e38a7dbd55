"""The life of a proxy process: listen, serve, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import structlog
import uvicorn

from arrow_tq.listening import bind, reachable
from arrow_tq.logs import log_json
from arrow_tq.proxy.app import ProxyApp
from arrow_tq.proxy.config import ProxyConfig
from arrow_tq.proxy.memory import few_arenas
from arrow_tq.proxy.parts import Parts
from arrow_tq_schemas.errors import ArrowTQError

CLOSE_S = 20.0
"""How long the store may take to close after draining, before the process ends without it."""
BACKLOG = 2048


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: those end a process with the signal's own exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: ProxyConfig) -> int:
    """Serve until SIGTERM or SIGINT; gives an exit code."""
    log_json(config.log_level)
    few_arenas()
    try:
        listener = bind(config.host, config.port, "port")
    except ArrowTQError as error:
        sys.stderr.write(f"arrow-tq proxy: {error.code}: {error.message}\n")
        return 1
    return asyncio.run(_serve(config, listener))


async def _serve(config: ProxyConfig, listener: socket.socket) -> int:
    log = structlog.get_logger("arrow_tq.proxy")
    parts = Parts.of(config)
    server = _Server(
        uvicorn.Config(
            ProxyApp(parts),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        )
    )

    def stop() -> None:
        log.info("stopping", drain_s=config.drain_s, calls=parts.under_way)
        parts.draining = True
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    opening = asyncio.create_task(_open_store(parts))
    host, port = listener.getsockname()[:2]
    sys.stdout.write(
        f"arrow-tq proxy http://{reachable(host)}:{port} -> {config.upstream} store={config.store}\n"
    )
    sys.stdout.flush()
    await server.serve(sockets=[listener])
    opening.cancel()
    if parts.commits:
        await asyncio.wait(parts.commits, timeout=CLOSE_S)
    try:
        async with asyncio.timeout(CLOSE_S):
            await parts.close()
    except TimeoutError:
        log.warning("stopping without the store's goodbye", close_s=CLOSE_S)
    log.info("stopped", exit_code=0)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait for a store that is gone must not keep the process.
    os._exit(0)


async def _open_store(parts: Parts) -> None:
    """Reach the store before the first call needs it; what goes wrong is told by that call too."""
    try:
        await parts.store.run()
    except Exception as error:
        structlog.get_logger("arrow_tq.proxy").warning("the store is not ready", message=str(error))
