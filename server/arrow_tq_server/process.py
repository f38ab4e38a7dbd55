"""The life of a server process: open, serve, drain, leave."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import structlog

from arrow_tq.client.address import check_url
from arrow_tq.client.placement import boot_id
from arrow_tq.client.tls import Tls as ClientTls
from arrow_tq.logs import log_json
from arrow_tq.sql import SqlLimits
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.store.cluster.shard_engine import ShardEngine
from arrow_tq.store.cluster.shard_engine_config import ShardEngineConfig
from arrow_tq.store.config import ClusterConfig
from arrow_tq.store.directory import Directory
from arrow_tq_schemas.cluster import ShardServer
from arrow_tq_schemas.errors import ArrowTQError, Unavailable
from arrow_tq_server.budgets import Activity
from arrow_tq_server.config import ServerConfig, is_loopback
from arrow_tq_server.guard import Guard
from arrow_tq_server.http import HttpPort
from arrow_tq_server.limits import raise_open_files
from arrow_tq_server.memory import default_memory_dir, sweep
from arrow_tq_server.metrics import Metrics
from arrow_tq_server.ports import Ports
from arrow_tq_server.service import Service
from arrow_tq_server.tls import Tls
from arrow_tq_server.tokens import Tokens

NOTE_NAME = "server.json"
GARBAGE_EVERY = 20_000
"""Objects made, less those freed, between two looks for cycles: our own requests make none."""
SIGNALS_MAX = 64
"""Numbers of signals that are read at a time."""
CLOSE_S = 30.0
"""How long the engine may take to close after draining, before the process ends without it."""


@dataclass(slots=True)
class ServerProcess:
    """One server of one data directory, from start to exit."""

    config: ServerConfig
    ports: Ports
    engine: Engine | ShardEngine
    activity: Activity
    metrics: Metrics
    http: HttpPort
    guard: Guard
    tls: Tls | None

    @classmethod
    def open(cls, config: ServerConfig) -> ServerProcess:
        """Take the ports and open the store; the HTTP port answers meanwhile.

        Raises:
            StoreInUse: another process has the data directory; names its pid and URL.
            Unavailable: a port is taken.
        """
        tls = Tls.of(config)
        guard = Guard(None if config.tokens_file is None else Tokens(config.tokens_file))
        try:
            ports = Ports.take(config)
        except Unavailable:
            # The same command started twice: that the store is in use is the better news.
            Directory.claim(config.data_dir, None).release()
            raise
        activity, metrics = Activity(), Metrics()
        http = HttpPort(ports.http, metrics, activity, guard, tls)
        http.start()
        warm_up()
        engine = _open(config, ports, tls)
        metrics.watch(engine.stats)
        tame_collector()
        return cls(config, ports, engine, activity, metrics, http, guard, tls)

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, drain, and end the process with exit code 0."""
        stop = _stop_signals()
        # Its handler runs when the main thread is awake: below, every signal wakes it.
        signal.signal(signal.SIGHUP, lambda *_: self.guard.look_again())
        self._warn()
        service = self._service()
        if isinstance(self.engine, ShardEngine):
            # Only now can the catalog call back. Ready once it counts on this shard.
            self.engine.start()
        self.http.ready(self._is_ready)
        self._announce()
        while not set(os.read(stop, SIGNALS_MAX)) & {signal.SIGTERM, signal.SIGINT}:
            pass
        self._leave(service)

    def _service(self) -> Service:
        self.ports.let_go()
        try:
            return Service(
                *(self.ports.location, self.engine, self.config, self.metrics, self.activity),
                advertised_url=_advertised(self.config, self.ports),
                guard=self.guard,
                tls=self.tls,
            )
        except pa.ArrowException as error:
            self.engine.close()
            port, reason = self.ports.flight_port, str(error).partition("\n")[0]
            raise Unavailable(f"port {port} on {self.config.host!r}: {reason}", port=port) from None

    def _announce(self) -> None:
        url, http_url = _advertised(self.config, self.ports), self.ports.http_url
        note = {"url": url, "http_url": http_url, "pid": os.getpid()}
        part = self._note.with_suffix(".part")
        part.write_text(json.dumps(note))
        part.replace(self._note)
        sys.stdout.write(f"arrow-tq serving {url} {http_url} data={self.config.data_dir}\n")
        sys.stdout.flush()

    def _is_ready(self) -> bool:
        return not isinstance(self.engine, ShardEngine) or self.engine.is_ready

    def _warn(self) -> None:
        config, log = self.config, structlog.get_logger("arrow_tq.server")
        if is_loopback(config.host):
            return
        if config.tokens_file is None:
            log.warning("serving other machines without tokens (insecure)", host=config.host)
        elif self.tls is None:
            log.warning("tokens and payload travel without encryption: set tls_cert", host=config.host)

    def _leave(self, service: Service) -> None:
        log = structlog.get_logger("arrow_tq.server")
        log.info("stopping", drain_s=self.config.drain_s)
        left = self.activity.drain(self.config.drain_s)
        if left:
            log.warning("stopping with work unfinished", calls=left)
        # shutdown() waits for the slowest reader without a bound, so nobody waits for shutdown().
        threading.Thread(target=service.shutdown, daemon=True).start()
        code = 0 if _within(CLOSE_S, self.engine.close, "arrow-tq-close") else 1
        self._note.unlink(missing_ok=True)
        self.http.stop()
        log.info("stopped", exit_code=code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    @property
    def _note(self) -> Path:
        return self.config.data_dir / NOTE_NAME


def run(config: ServerConfig) -> int:
    """Serve; returns an exit code only where serving could not start."""
    log_json(config.log_level)
    # A backstop: what is sent to a client must never hold paths of this machine.
    sys.tracebacklimit = 0
    raise_open_files()
    for directory in sweep():
        structlog.get_logger("arrow_tq.server").info("memory directory swept", directory=str(directory))
    try:
        ServerProcess.open(config).serve()
    except ArrowTQError as error:
        sys.stderr.write(f"arrow-tq serve: {error.code}: {error.message}\n")
        return 1
    return 0


def warm_up() -> None:
    """Import now what the first claim would import while its lease runs: a third of a second of it."""
    # pyarrow imports pandas, where it is installed, when it first sees Python values.
    pa.array([0])
    importlib.import_module("sqlglot.dialects.duckdb")


def tame_collector() -> None:
    """Leave what was imported out of collections: walking all of it stops every request for 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EVERY, *gc.get_threshold()[1:])


def _open(config: ServerConfig, ports: Ports, tls: Tls | None) -> Engine | ShardEngine:
    """What is behind the ports, by role."""
    url = _advertised(config, ports)
    memory_dir = config.memory_dir or default_memory_dir(config.data_dir)
    within = None
    if config.cluster_ca is not None or tls is not None:
        within = ClientTls(config.cluster_ca) if tls is None else tls.as_client(config.cluster_ca)
    if config.role == "shard":
        assert config.join is not None
        return ShardEngine(
            ShardEngineConfig(
                data_dir=config.data_dir,
                catalog_url=check_url(config.join),
                server=ShardServer(url=url, host=config.host_id or boot_id()),
                memory_dir=memory_dir,
                capacity_bytes=config.capacity_bytes,
                soft_mark=config.soft_mark,
                orphan_ttl_s=config.orphan_ttl_s,
                cache_bytes=config.cache_bytes,
                token=config.cluster_token,
                tls=within,
            )
        )
    cluster = ClusterConfig(
        url=url,
        host=config.host_id or boot_id(),
        holds_chunks=config.role == "all",
        lease_s=config.lease_s,
        fence_s=config.fence_s,
        token=config.cluster_token,
        tls=within,
    )
    return Engine(
        EngineConfig(
            data_dir=config.data_dir,
            memory_dir=memory_dir,
            capacity_bytes=config.capacity_bytes,
            soft_mark=config.soft_mark,
            memory_share=config.memory_share,
            run_quota_bytes=config.run_quota_bytes,
            run_quotas=config.run_quotas,
            url=url,
            orphan_ttl_s=config.orphan_ttl_s,
            blob_bytes_max=config.blob_bytes_max,
            keep_marks=config.keep_marks,
            keep_released_s=config.keep_released_s,
            sql=SqlLimits(
                timeout_s=config.sql_timeout_s,
                memory_bytes=config.sql_memory_bytes,
                result_bytes_max=config.sql_result_bytes_max,
                rows_max=config.sql_rows_max,
            ),
            cluster=cluster,
        )
    )


def _advertised(config: ServerConfig, ports: Ports) -> str:
    return config.advertise_url or ports.url


def _stop_signals() -> int:
    """A descriptor that tells the numbers of signals that came.

    Whatever thread the kernel interrupts writes them, and not a handler in Python: that one waits for the
    main thread, which would wait for it in the read of this descriptor.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


def _within(timeout_s: float, call: Callable[[], None], name: str) -> bool:
    """Run a call in a thread; whether it returned in time and without an error."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        structlog.get_logger("arrow_tq.server").error("close failed", exc_info=failed[0])
    return not thread.is_alive() and not failed
