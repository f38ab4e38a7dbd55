"""Bounds and deadlines of a client. Sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from arrow_tq_schemas.errors import InvalidInput

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What ``connect`` may be told. The defaults suit trainers and rollout proxies alike.

    Args:
        connect_s: until a server that does not answer is called unreachable.
        action_s: deadline of one command.
        commit_s: deadline of one step commit.
        read_s: deadline of one answer, first to last row, waiting for pending chunks not counted.
        wait_piece_s: longest wait in one call; longer waits (for a claim) become several calls.
        retry_pause_s: pause before the one retry of a call that did not reach the server.
        catalog_wait_s: how long a call to a cluster's catalog is repeated while nobody answers there, because
            its supervisor restarts it. A server that is the only one is asked twice.
        put_inflight_bytes_max: payload bytes handed over and not acked yet; past it ``put`` waits.
        put_room_s: how long a put waits for that room.
        put_streams: streams that one field's chunks are spread over while more than an ack window waits: the
            server reads from one while it checks and stores from another.
        ack_window_bytes: bytes of one stream after which the client asks for an ack.
        coalesce_bytes: small chunks that wait for the same stream share a message up to this size.
        stream_idle_s: a put or commit stream that has nothing to carry is closed after this.
        stream_life_s: a stream is replaced at this age, and its deadline is twice that: nothing that
            depends on it can hang for longer.
        get_streams: streams that one large read is split over; on one machine more than one only costs.
        get_split_bytes: size of the pieces that several streams fetch; one alone asks for 1 GiB at a time.
        get_spans_max: spans asked for in one ticket; more become several tickets, one after another.
        get_window_bytes: what a server may send on a stream ahead of its reader. A stream moves about as much
            a round trip: raise it for a server that is milliseconds away.
        bundle_staging_bytes_max: memory that a bundle on its way out is gathered in, used again and again.
        keepalive_s: how often an idle connection is probed, so that load balancers keep it; servers end
            connections that are probed more often than every 300 s.
        same_host: map the server's extents where it runs on this machine as a user whose files can be read.
        map_idle_s: a mapped extent that nobody reads for so long is let go; a released one after 8 s.
        map_extents_max: extents mapped at a time; each takes a file descriptor, two while it is viewed.
        fork_wait_s: how long a fork waits for connections to be let go; only then can the child connect.
    """

    connect_s: float = 10.0
    action_s: float = 60.0
    commit_s: float = 60.0
    read_s: float = 600.0
    wait_piece_s: float = 30.0
    retry_pause_s: float = 0.3
    catalog_wait_s: float = 60.0
    put_inflight_bytes_max: int = 256 * MIB
    put_room_s: float = 120.0
    put_streams: int = 2
    ack_window_bytes: int = 16 * MIB
    coalesce_bytes: int = 1 * MIB
    stream_idle_s: float = 10.0
    stream_life_s: float = 60.0
    get_streams: int = 1
    get_split_bytes: int = 32 * MIB
    get_spans_max: int = 100_000
    get_window_bytes: int = 2 * MIB
    bundle_staging_bytes_max: int = 48 * MIB
    keepalive_s: float = 320.0
    same_host: bool = True
    map_idle_s: float = 30.0
    map_extents_max: int = 256
    fork_wait_s: float = 0.5

    def __post_init__(self) -> None:
        for slot in fields(self):
            value = getattr(self, slot.name)
            if slot.name == "same_host":
                if not isinstance(value, bool):
                    raise InvalidInput(f"client option same_host={value!r}: expected True or False")
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise InvalidInput(f"client option {slot.name}={value!r}: expected a number above 0")
