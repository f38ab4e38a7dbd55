"""Put and get on the server's own machine: mapped, over TCP, and over a Unix socket, in turns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import arrow_tq
from arrow_tq import fields
from benchmarks import servers
from benchmarks.report import Row, against, interleaved, rate
from benchmarks.sizes import EXPERTS, LAYERS, TOPK, Sizes, routing
from benchmarks.wire import WIRE, Bare, Getter, Putter


def rows(sizes: Sizes) -> list[Row]:
    """The same pieces each way. A Unix socket is given its best case: plain Flight that keeps nothing."""
    random = np.random.default_rng(0)
    shape = (sizes.piece_tokens, LAYERS, TOPK)
    pieces = [random.integers(0, EXPERTS, shape, dtype=np.uint8) for _ in range(2)]
    source = [pieces[index % 2] for index in range(sizes.wire_pieces)]
    with (
        servers.ours() as url,
        servers.bare_unix() as unix_url,
        arrow_tq.connect(url) as store,
        arrow_tq.connect(url, options=WIRE) as wired,
    ):
        declared = [fields.token_ids(), routing()]
        here, there = store.run("here", fields=declared), wired.run("there", fields=declared)
        bare = Bare(unix_url, source)
        puts = [Putter(here, source), Putter(there, source), bare.put, _copy(source)]
        put, put_wire, put_unix, memcpy = interleaved(sizes.rounds, puts, sizes.pause_s)
        getter, wire_getter = Getter(here, source), Getter(there, source)
        gets = [getter, wire_getter, bare.get, _copy(source)]
        get, get_wire, get_unix, copied = interleaved(sizes.rounds, gets)
        getter.check()
        return [
            against("put on the same host, to the wire over TCP", put, put_wire, "GB/s", None),
            against("put on the same host, to bare Flight over a Unix socket", put, put_unix, "GB/s", None),
            against("put on the same host, to memcpy", put, memcpy, "GB/s", None),
            against("get on the same host, to the wire over TCP", get, get_wire, "GB/s", None),
            against("get on the same host, to bare Flight over a Unix socket", get, get_unix, "GB/s", None),
            against("get on the same host, to memcpy", get, copied, "GB/s", None),
            *_wide(getter, source, sizes),
        ]


def _copy(source: list[np.ndarray]) -> Callable[[], float]:
    """The bytes into one warm buffer: what moving them costs at least."""
    out = np.ones((sum(map(len, source)), LAYERS, TOPK), np.uint8)

    def work() -> None:
        place = 0
        for piece in source:
            out[place : place + len(piece)] = piece
            place += len(piece)

    return lambda: rate(out.nbytes / 1e9, work)


def _wide(getter: Getter, source: list[np.ndarray], sizes: Sizes) -> list[Row]:
    """What a trainer reads: int32, widened on the way into its buffer."""
    whole = np.concatenate(source)
    out = np.ones((len(whole) + 1, LAYERS, TOPK), np.int32)

    def fetch() -> float:
        return rate(whole.nbytes / 1e9, lambda: getter.fetch(out))

    def widen() -> float:
        return rate(whole.nbytes / 1e9, lambda: np.copyto(out[:-1], whole))

    ours, numpy = interleaved(sizes.rounds, [fetch, widen])
    name = "get on the same host as int32, to numpy's own widening copy"
    return [against(name, ours, numpy, "GB/s stored", 0.80)]
