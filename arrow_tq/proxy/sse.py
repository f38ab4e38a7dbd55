"""Server-sent events: cut out of a byte stream as they come, and put together again unchanged."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
_ENDS = (b"\n\n", b"\r\n\r\n")


class Events:
    """Cuts a stream into events. An event keeps its bytes, the empty line that ends it included."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    @property
    def nbytes(self) -> int:
        """Bytes of an event whose end has not come."""
        return len(self._buffer)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Every event that ends with this piece."""
        self._buffer += piece
        while (end := self._end()) >= 0:
            event = bytes(self._buffer[:end])
            del self._buffer[:end]
            self._searched = 0
            yield event

    def rest(self) -> bytes:
        """What is left without an end."""
        return bytes(self._buffer)

    def _end(self) -> int:
        found = [self._buffer.find(mark, self._searched) for mark in _ENDS]
        ends = [place + len(mark) for place, mark in zip(found, _ENDS, strict=True) if place >= 0]
        if ends:
            return min(ends)
        # The mark itself may be cut.
        self._searched = max(len(self._buffer) - 3, 0)
        return -1


def data_of(event: bytes) -> tuple[int, int] | None:
    """Where the data of an event is; None for comments, other lines, and data of several lines."""
    if not event.startswith(b"data:"):
        return None
    start = 6 if event[5:6] == b" " else 5
    end = len(event)
    while end > start and event[end - 1] in b"\r\n":
        end -= 1
    if event.find(b"\n", start, end) >= 0:
        return None
    return start, end


def event_of(data: bytes) -> bytes:
    """An event with this data."""
    return b"data: " + data + b"\n\n"
