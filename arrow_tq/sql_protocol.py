"""What the SQL service and its worker process say to each other, over a Unix socket.

A frame is a JSON header and a payload, each with its length in front (u32 and u64, little-endian). A
payload is an Arrow IPC stream or empty. The service asks, the worker answers each request once.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from arrow_tq_schemas.errors import InternalError, InvalidInput

HEADER_BYTES_MAX = 1 << 20
PAYLOAD_BYTES_MAX = 2 << 30
_LENGTHS = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """Bounds of SQL over the metadata.

    Args:
        timeout_s: a query that runs longer is killed.
        memory_bytes: what the tables of one scope and a query over them may use.
        result_bytes_max: a query with a larger result is stopped.
        rows_max: so is one with more rows.
        query_bytes_max: length of a query's text.
        wait_s: how long a query waits for those before it.
        waiting_max: how many may wait.
        scopes_max: runs (all of them together count as one) whose tables the worker holds.
        threads: threads of one query.
        start_s: how long a worker process may take to start.
        close_s: how long it may take to end before it is killed.
    """

    timeout_s: float = 30.0
    memory_bytes: int = 1 << 30
    result_bytes_max: int = 256 << 20
    rows_max: int = 10_000_000
    query_bytes_max: int = 128 << 10
    wait_s: float = 60.0
    waiting_max: int = 64
    scopes_max: int = 4
    threads: int = 2
    start_s: float = 30.0
    close_s: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} {getattr(self, name)}: expected more than 0")
        if self.result_bytes_max > PAYLOAD_BYTES_MAX:
            raise InvalidInput(
                f"result_bytes_max {self.result_bytes_max}: expected {PAYLOAD_BYTES_MAX} at most"
            )
        if self.query_bytes_max > HEADER_BYTES_MAX // 8:
            # A header is JSON, where one byte of a query takes six at worst.
            raise InvalidInput(
                f"query_bytes_max {self.query_bytes_max}: expected {HEADER_BYTES_MAX // 8} at most"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message."""

    header: Mapping[str, object]
    payload: bytes | bytearray | memoryview = b""

    def table(self) -> pa.Table:
        """The payload as a table, its every value checked (a lying offset would crash the reader)."""
        table = pa.ipc.open_stream(pa.py_buffer(self.payload)).read_all()
        table.validate(full=True)
        return table


def table_frame(header: Mapping[str, object], table: pa.Table) -> Frame:
    """A frame with a table as its payload."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Frame(header, memoryview(sink.getvalue()))


class Channel:
    """One end of the socket. Not for more than one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        """Raises ``TimeoutError`` past ``deadline`` (of ``time.monotonic``), ``OSError`` if nobody reads."""
        header = json.dumps(dict(frame.header)).encode()
        payload = memoryview(frame.payload).cast("B")
        if len(header) > HEADER_BYTES_MAX or payload.nbytes > PAYLOAD_BYTES_MAX:
            raise InternalError(f"SQL frame of {len(header)} + {payload.nbytes} bytes is too large")
        self._set_timeout(deadline)
        self.socket.sendall(_LENGTHS.pack(len(header), payload.nbytes) + header)
        if payload.nbytes:
            self.socket.sendall(payload)

    def receive(self, deadline: float | None = None) -> Frame:
        """Raises ``TimeoutError`` past ``deadline``, ``EOFError`` when the other end is gone."""
        header_bytes, payload_bytes = _LENGTHS.unpack(self._exactly(_LENGTHS.size, deadline))
        if header_bytes > HEADER_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
            raise EOFError(f"the other end speaks no frames ({header_bytes} + {payload_bytes} bytes)")
        header = json.loads(self._exactly(header_bytes, deadline))
        return Frame(header, self._exactly(payload_bytes, deadline))

    def close(self) -> None:
        # A fork may hold a copy of our end: shut it down, so that the other one sees the end.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _exactly(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            self._set_timeout(deadline)
            count = self.socket.recv_into(view[done:])
            if not count:
                raise EOFError("the other end closed")
            done += count
        return data

    def _set_timeout(self, deadline: float | None) -> None:
        if deadline is None:
            self.socket.settimeout(None)
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("deadline passed")
        self.socket.settimeout(left_s)
