"""The HTTP port: liveness, readiness and metrics, for supervisors and Prometheus."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from arrow_tq_schemas.access import need
from arrow_tq_schemas.errors import PermissionDenied, Unauthenticated
from arrow_tq_server.budgets import Activity
from arrow_tq_server.guard import Guard
from arrow_tq_server.metrics import Metrics
from arrow_tq_server.tls import Tls

STOP_S = 2.0


class HttpPort:
    """Serves from a thread of its own, from before the engine opens until the process ends."""

    def __init__(
        self, listener: socket.socket, metrics: Metrics, activity: Activity, guard: Guard, tls: Tls | None
    ) -> None:
        self._guard = guard
        self._metrics = metrics
        self._activity = activity
        self._listener = listener
        self._is_ready: Callable[[], bool] = lambda: False
        routes = [
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/metrics", self._show_metrics),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            workers=1,
            ssl_certfile=None if tls is None else str(tls.cert_file),
            ssl_keyfile=None if tls is None else str(tls.key_file),
            ssl_ca_certs=None if tls is None or tls.client_ca_file is None else str(tls.client_ca_file),
            ssl_cert_reqs=ssl.CERT_NONE if tls is None or tls.client_ca_file is None else ssl.CERT_REQUIRED,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="arrow-tq-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ready(self, is_ready: Callable[[], bool]) -> None:
        """The engine is open: ``/readyz`` says what ``is_ready`` does."""
        self._is_ready = is_ready

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
        if not self._is_ready():
            return PlainTextResponse("not ready yet\n", status_code=503)
        return PlainTextResponse("ok\n")

    async def _show_metrics(self, request: Request) -> Response:
        try:
            # Metrics name every run.
            self._guard.grant(request.headers.get("authorization")).check(need(["read"]), "/metrics")
        except Unauthenticated as error:
            return PlainTextResponse(
                f"{error.message}\n", status_code=401, headers={"www-authenticate": "Bearer"}
            )
        except PermissionDenied as error:
            return PlainTextResponse(f"{error.message}\n", status_code=403)
        text = await run_in_threadpool(self._metrics.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
