"""How a connection comes about, on machines and networks that take their time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

import arrow_tq
from arrow_tq import errors
from arrow_tq.client import ClientOptions
from tests.serving import Server

HOP_BYTES = 1 << 16


def _carry(source: socket.socket, target: socket.socket, wait_s: float) -> None:
    """Pass on what comes, all of it so much later than the first of it came."""
    with contextlib.suppress(OSError):
        waited = False
        while piece := source.recv(HOP_BYTES):
            if not waited:
                time.sleep(wait_s)
                waited = True
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def late(url: str, wait_s: float) -> Iterator[str]:
    """URL of a way to a server on which the server's first words arrive late."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    held: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                held.extend((near, far))
                for ends in ((near, far, 0.0), (far, near, wait_s)):
                    threading.Thread(target=_carry, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in held:
                one.close()


def test_a_server_that_is_slow_to_greet_is_waited_for(server: Server) -> None:
    with late(server.url, 1.0) as url, arrow_tq.connect(url) as store:
        assert store.pressure().waiters == 0


def test_the_greeting_counts_against_the_time_to_connect(server: Server) -> None:
    with late(server.url, 4.0) as url:
        began = time.monotonic()
        with pytest.raises(errors.Unreachable, match=url):
            arrow_tq.connect(url, options=ClientOptions(connect_s=0.5))
        assert time.monotonic() - began < 3
