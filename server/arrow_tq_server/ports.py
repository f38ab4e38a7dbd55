"""Ports: found free, held, and told in URLs."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from arrow_tq_schemas.errors import Unavailable
from arrow_tq_server.config import ServerConfig

EVERY_ADDRESS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Ports:
    """Both ports, held while the store opens; gRPC binds the Flight port itself once it is let go."""

    flight: socket.socket
    http: socket.socket
    host: str
    flight_port: int

    @classmethod
    def take(cls, config: ServerConfig) -> Ports:
        """Raises ``Unavailable`` naming the port that another process has."""
        flight = _bind(config.host, config.port, "port")
        try:
            http = _bind(config.host, config.http_port, "http_port")
        except BaseException:
            flight.close()
            raise
        return cls(flight, http, config.host, flight.getsockname()[1])

    @property
    def location(self) -> str:
        """What gRPC is told to bind."""
        return f"grpc://{_bracketed(self.host)}:{self.flight_port}"

    @property
    def url(self) -> str:
        return f"grpc://{_reachable(self.host)}:{self.flight_port}"

    @property
    def http_url(self) -> str:
        return f"http://{_reachable(self.host)}:{self.http.getsockname()[1]}"

    def let_go(self) -> None:
        """Free the Flight port for gRPC, which does not share it."""
        self.flight.close()


def _bind(host: str, port: int, setting: str) -> socket.socket:
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"{setting} {port} on {host!r}: {error.strerror or error}", setting=setting, port=port
        ) from None
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _reachable(host: str) -> str:
    return socket.gethostname() if host in EVERY_ADDRESS else _bracketed(host)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
