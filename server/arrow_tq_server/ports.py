"""Ports: found free, held, and told in URLs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from arrow_tq.listening import bind, bracketed, reachable
from arrow_tq_schemas.errors import InvalidInput, Unavailable
from arrow_tq_server.config import ServerConfig

UNIX_PATH_BYTES_MAX = 107
"""What the kernel takes."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Both ports, held while the store opens; gRPC binds the Flight port itself once it is let go."""

    flight: socket.socket | None
    """None where Flight is on a Unix socket."""
    http: socket.socket
    host: str
    flight_port: int
    scheme: str
    unix_socket: Path | None

    @classmethod
    def take(cls, config: ServerConfig) -> Ports:
        """Raises ``Unavailable`` naming the port that another process has."""
        flight = None
        if config.unix_socket is None:
            flight = bind(config.host, config.port, "port")
        else:
            _clear(config.unix_socket)
        try:
            http = bind(config.host, config.http_port, "http_port")
        except BaseException:
            if flight is not None:
                flight.close()
            raise
        port = 0 if flight is None else flight.getsockname()[1]
        scheme = "grpc" if config.tls_cert is None else "grpc+tls"
        return cls(flight, http, config.host, port, scheme, config.unix_socket)

    @property
    def location(self) -> str:
        """What gRPC is told to bind."""
        if self.unix_socket is not None:
            return f"grpc+unix://{self.unix_socket.absolute()}"
        return f"{self.scheme}://{bracketed(self.host)}:{self.flight_port}"

    @property
    def url(self) -> str:
        if self.unix_socket is not None:
            return self.location
        return f"{self.scheme}://{reachable(self.host)}:{self.flight_port}"

    @property
    def http_url(self) -> str:
        scheme = "http" if self.scheme == "grpc" else "https"
        return f"{scheme}://{reachable(self.host)}:{self.http.getsockname()[1]}"

    def let_go(self) -> None:
        """Free the Flight port for gRPC, which does not share it."""
        if self.flight is not None:
            self.flight.close()


def _clear(path: Path) -> None:
    """Make way for a Unix socket: what a server before left there is removed, nothing else is."""
    if len(os.fsencode(path.absolute())) > UNIX_PATH_BYTES_MAX:
        raise InvalidInput(f"setting unix_socket: {str(path)!r} is longer than {UNIX_PATH_BYTES_MAX} bytes")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    if not path.is_socket():
        raise InvalidInput(f"setting unix_socket: {str(path)!r} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise Unavailable(f"unix_socket {str(path)!r}: another process serves it", setting="unix_socket")
