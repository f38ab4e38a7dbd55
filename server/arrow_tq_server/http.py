"""The HTTP port: liveness, readiness and metrics, for supervisors and Prometheus."""

from __future__ import annotations

import socket
import threading

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from arrow_tq_server.budgets import Activity
from arrow_tq_server.metrics import Metrics

STOP_S = 2.0


class HttpPort:
    """Serves from a thread of its own, from before the engine opens until the process ends."""

    def __init__(self, listener: socket.socket, metrics: Metrics, activity: Activity) -> None:
        self._metrics = metrics
        self._activity = activity
        self._listener = listener
        self._ready = threading.Event()
        routes = [
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/metrics", self._show_metrics),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", workers=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="arrow-tq-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ready(self) -> None:
        """The engine is open: ``/readyz`` may say so."""
        self._ready.set()

    def stop(self) -> None:
        """Stop within a bound; the thread is a daemon and goes with the process in any case."""
        self._server.should_exit = True
        self._thread.join(STOP_S)

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    async def _livez(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        if self._activity.draining:
            return PlainTextResponse("stopping\n", status_code=503)
        if not self._ready.is_set():
            return PlainTextResponse("opening the store\n", status_code=503)
        return PlainTextResponse("ok\n")

    async def _show_metrics(self, request: Request) -> Response:
        text = await run_in_threadpool(self._metrics.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
