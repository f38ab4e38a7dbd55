"""Chunk ids: a UUIDv8 (RFC 9562) that says where its chunk lives.

Bits, high to low: 48 unix time in ms, 4 version (8), 12 shard, 2 variant (0b10), 8 layer group,
54 random. References and handles carry layer group 0; its siblings differ in the group bits alone.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import secrets
import time
from dataclasses import dataclass

from arrow_tq_schemas.errors import MalformedMessage

SHARD_MAX = (1 << 12) - 1
GROUP_MAX = (1 << 8) - 1
RANDOM_BITS = 54
_GROUP_SHIFT = RANDOM_BITS
_SHARD_SHIFT = 64
_TIME_SHIFT = 80
_GROUP_MASK = GROUP_MAX << _GROUP_SHIFT
_VERSION = 8 << 76
_VARIANT = 0b10 << 62
_MARKS = _VERSION | _VARIANT
_RANDOM_MASK = (1 << RANDOM_BITS) - 1
PARSED_MAX = 4096
"""Ids kept with their text: each is asked for several times while its chunk is stored, or committed."""
_HEX = re.compile(r"[0-9a-fA-F]{32}")


@dataclass(frozen=True, slots=True, order=True)
class ChunkId:
    """128 bits, big-endian as bytes and as text."""

    value: int

    def __hash__(self) -> int:
        # The one that would be generated hashes a tuple: twice the cost, at several look-ups a chunk.
        return hash(self.value)

    @classmethod
    def make(cls, time_ms: int, shard: int, group: int, random: int) -> ChunkId:
        """An id from its parts; each must be within its bits."""
        if not (0 <= time_ms < 1 << 48 and 0 <= shard <= SHARD_MAX and 0 <= group <= GROUP_MAX):
            raise MalformedMessage(f"chunk id parts {time_ms}, {shard}, {group}: out of range")
        if not 0 <= random < 1 << RANDOM_BITS:
            raise MalformedMessage(f"chunk id random part {random}: more than {RANDOM_BITS} bits")
        return cls(
            time_ms << _TIME_SHIFT
            | _VERSION
            | shard << _SHARD_SHIFT
            | _VARIANT
            | group << _GROUP_SHIFT
            | random
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> ChunkId:
        """The id whose 16 big-endian bytes these are; refuses another UUID version."""
        if len(raw) != 16 or raw[6] >> 4 != 8 or raw[8] >> 6 != 0b10:
            raise MalformedMessage(f"chunk id {raw.hex()}: expected the 16 bytes of a UUIDv8")
        return cls(int.from_bytes(raw, "big"))

    @classmethod
    def from_hex(cls, text: str) -> ChunkId:
        """The id that these 32 hex digits name; refuses another UUID version."""
        if not isinstance(text, str):
            raise MalformedMessage(f"chunk id {text!r}: expected 32 hex digits of a UUIDv8")
        return _parsed(text)

    def to_bytes(self) -> bytes:
        return self.value.to_bytes(16, "big")

    @property
    def hex(self) -> str:
        return f"{self.value:032x}"

    @property
    def time_ms(self) -> int:
        return self.value >> _TIME_SHIFT

    @property
    def shard(self) -> int:
        return self.value >> _SHARD_SHIFT & SHARD_MAX

    @property
    def group(self) -> int:
        return self.value >> _GROUP_SHIFT & GROUP_MAX

    def sibling(self, group: int) -> ChunkId:
        """The chunk of the same rows in another layer group."""
        if not 0 <= group <= GROUP_MAX:
            raise MalformedMessage(f"layer group {group}: expected 0 to {GROUP_MAX}")
        return ChunkId(self.value & ~_GROUP_MASK | group << _GROUP_SHIFT)


@functools.lru_cache(PARSED_MAX)
def _parsed(text: str) -> ChunkId:
    if not _HEX.fullmatch(text):
        raise MalformedMessage(f"chunk id {text!r}: expected 32 hex digits of a UUIDv8")
    value = int(text, 16)
    if value >> 76 & 0xF != 8 or value >> 62 & 0b11 != 0b10:
        raise MalformedMessage(f"chunk id {text}: expected the 16 bytes of a UUIDv8")
    return ChunkId(value)


class IdFactory:
    """Makes chunk ids for one writer. Thread-safe, and safe after fork.

    The random part starts at a random number and counts up, so that consecutive ids of a writer
    differ in few bits: manifests compress by it.
    """

    def __init__(self) -> None:
        self._writer = _writer()

    def next(self, shard: int) -> ChunkId:
        # No lock, which a fork could copy while it is held: a race here only makes one writer more.
        pid, count = self._writer
        if pid != os.getpid():
            self._writer = pid, count = _writer()
        if not 0 <= shard <= SHARD_MAX:
            raise MalformedMessage(f"shard {shard}: expected 0 to {SHARD_MAX}")
        # As ``make``, whose other parts are within their bits here.
        time_ms, random = time.time_ns() // 1_000_000, next(count) & _RANDOM_MASK
        return ChunkId(time_ms << _TIME_SHIFT | _MARKS | shard << _SHARD_SHIFT | random)


class IdSeries:
    """Ids of one stream of chunks: one time, and a random part that counts up by one.

    A receipt names such a stream by its first id (``Receipt.to_json``). Not thread-safe.
    """

    def __init__(self) -> None:
        self._time_ms = time.time_ns() // 1_000_000
        # Half of the range, so that counting never wraps.
        self._random = secrets.randbits(RANDOM_BITS - 1)

    def next(self, shard: int) -> ChunkId:
        self._random += 1
        return ChunkId.make(self._time_ms, shard, 0, self._random)


def _writer() -> tuple[int, itertools.count[int]]:
    """This process, and a counter from a random number up."""
    return os.getpid(), itertools.count(secrets.randbits(RANDOM_BITS))
