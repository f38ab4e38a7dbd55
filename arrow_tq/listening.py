"""Addresses that a process listens on: taken, and told to others."""

from __future__ import annotations

import socket

from arrow_tq_schemas.errors import Unavailable

EVERY_ADDRESS = ("0.0.0.0", "::", "")


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A TCP socket bound to the address; raises ``Unavailable`` naming the setting whose port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"{setting} {port} on {host!r}: {error.strerror or error}", setting=setting, port=port
        ) from None
    return listener


def reachable(host: str) -> str:
    """The host as others put it into a URL: this machine's name where it listens on every address."""
    return socket.gethostname() if host in EVERY_ADDRESS else bracketed(host)


def bracketed(host: str) -> str:
    """The host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
