"""The catalog's calls to one far shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from arrow_tq.backend import Read, Rows
from arrow_tq.client.connection import Connection
from arrow_tq.client.reads import read
from arrow_tq.store.cluster.shard_map import Member
from arrow_tq_schemas.chunks import Chunk, ChunkHeader
from arrow_tq_schemas.cluster import (
    ConfirmChunks,
    Confirmed,
    ConfirmedChunk,
    Digest,
    DigestChunks,
    FetchChunks,
    TendChunks,
)
from arrow_tq_schemas.commands import Command, Done, GetStats, Reply, Stats, Wire, unpack_reply
from arrow_tq_schemas.errors import DeadlineExceeded, InternalError, Unavailable, Unreachable
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId

FieldOf = Callable[[str, str], Field]
"""Field by run and name."""
Body = TypeVar("Body", bound=Wire)
CALL_S = 5.0
"""Deadline of one call: a shard that takes longer for a few ids is taken for dead until it beats again."""


class ShardLink:
    """One shard in one epoch. Thread-safe.

    Every call raises ``Unavailable`` naming the shard where it does not answer; ``on_lost`` hears of it.
    """

    def __init__(self, member: Member, connection: Connection, on_lost: Callable[[int], None]) -> None:
        self.member = member
        self._connection = connection
        self._on_lost = on_lost

    def confirm(self, run: str, ids: Sequence[ChunkId]) -> Confirmed:
        """What is stored under these ids, which the shard keeps for a commit under way; how full it is."""
        command = ConfirmChunks(
            number=self.member.number, epoch=self.member.epoch, run=run, ids=[one.hex for one in ids]
        )
        return self._body(command, Confirmed)

    def tend(self, run: str, ids: Sequence[ChunkId], keep: bool) -> int:
        """Free those that no step attached, or keep them; gives how many."""
        command = TendChunks(
            number=self.member.number,
            epoch=self.member.epoch,
            run=run,
            ids=[one.hex for one in ids],
            keep=keep,
        )
        return self._body(command, Done).count

    def fetch(self, fields: FieldOf, chunk_id: ChunkId) -> Chunk | None:
        """One whole chunk, attached or not; ``fields`` says what its values are."""
        command = FetchChunks(number=self.member.number, epoch=self.member.epoch, ids=[chunk_id.hex])
        reply = self._ask(command)
        body = reply.body
        if not isinstance(body, Confirmed) or len(body.chunks) != 1 or len(reply.blobs) != 2:
            raise InternalError(f"shard {self.member.number}: not the reply to {command.verb}")
        (found,) = body.chunks
        if found is None:
            return None
        field = fields(found.run, found.field)
        shape = (found.rows, *field.group_shape(chunk_id.group))
        values = np.frombuffer(reply.blobs[0], field.type.numpy).reshape(shape)
        valid = np.frombuffer(reply.blobs[1], np.bool_) if reply.blobs[1] else None
        return Chunk(header_of(chunk_id, found), values, valid)

    def digest(self, ids: Sequence[ChunkId]) -> str:
        """SHA-256 of chunks' values one after another, as hex."""
        command = DigestChunks(
            number=self.member.number, epoch=self.member.epoch, ids=[one.hex for one in ids]
        )
        return self._body(command, Digest).sha256

    def stats(self) -> dict[str, float]:
        """What the shard counts, by name."""
        return self._body(GetStats(), Stats).values

    def read(self, request: Read) -> Iterator[Rows]:
        """Rows of chunks that are all on this shard."""
        return read(self._connection, request)

    def _body(self, command: Command, kind: type[Body]) -> Body:
        body = self._ask(command).body
        if not isinstance(body, kind):
            raise InternalError(f"shard {self.member.number}: not the reply to {command.verb}")
        return body

    def _ask(self, command: Command) -> Reply:
        raw = command.model_dump_json().encode()
        try:
            answer = self._connection.retrying(lambda: self._connection.action(command.verb, raw, CALL_S))
        except (Unreachable, DeadlineExceeded) as error:
            self._on_lost(self.member.number)
            raise out_of_reach(self.member.number, self.member.server.url, error.message) from None
        return unpack_reply(command, answer)


def header_of(chunk_id: ChunkId, found: ConfirmedChunk) -> ChunkHeader:
    """A chunk's header from what its shard confirmed."""
    return ChunkHeader.model_construct(
        v=1, id=chunk_id.hex, run=found.run, epoch=found.epoch, field=found.field, start=found.start,
        rows=found.rows, checksum=found.checksum, token="",
    )  # fmt: skip


def out_of_reach(number: int, url: str, why: str) -> Unavailable:
    """The error for a shard that cannot be asked now."""
    return Unavailable(f"shard {number} at {url} is out of reach ({why}): try again", shard=number, url=url)
