"""Appending and reading in one process, against memcpy and numpy's casts of the same pieces."""

from __future__ import annotations

import itertools
import mmap
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.store import Engine, EngineConfig
from benchmarks.report import Row, against, interleaved, rate
from benchmarks.sizes import EXPERTS, LAYERS, TOPK, Sizes, routing

EXTENT_BYTES = 256 << 20


def rows(sizes: Sizes) -> list[Row]:
    """Append (same dtype, narrowed, sustained) and read."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        config = EngineConfig(data_dir=Path(folder) / "data", capacity_bytes=8 << 30, soft_mark=1.0)
        with Store(Engine(config)) as store:
            run = store.run("bench", fields=[fields.token_ids(), routing()])
            return [*_append(run, sizes), *_sustained(run, sizes), *_read(run, sizes)]


def _payload(sizes: Sizes, dtype: str) -> list[npt.NDArray[np.generic]]:
    random = np.random.default_rng(0)
    shape = (sizes.piece_tokens, LAYERS, TOPK)
    # Two pieces in turn: more would only measure the source's cache misses twice.
    return [random.integers(0, EXPERTS, shape).astype(dtype) for _ in range(2)]


def _destination(size: int) -> npt.NDArray[np.uint8]:
    """Memory whose pages exist already, as in a warm extent."""
    area = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    area[:] = 1
    return area


class _Appender:
    """Puts pieces into a session that is aborted after each round, outside the timing."""

    def __init__(self, run: Run, pieces: list[npt.NDArray[np.generic]], count: int) -> None:
        self._run, self._pieces, self._count = run, pieces, count
        self._round = 0

    def __call__(self) -> float:
        self._round += 1
        session = self._run.session(f"append-{self._round}-{id(self)}")
        tokens = self._pieces[0].shape[0]
        size = self._count * tokens * LAYERS * TOPK / 1e9

        def puts() -> None:
            for index in range(self._count):
                step.put("routed_experts", self._pieces[index % 2], start=index * tokens)

        step = session.step()
        figure = rate(size, puts)
        step.cancel()
        session.abort()
        return figure


def _append(run: Run, sizes: Sizes) -> list[Row]:
    narrow, wide = _payload(sizes, "uint8"), _payload(sizes, "int32")
    # As large as an extent and walked through like one: a target that stays in the cache is no extent.
    size = sizes.warm_pieces * sizes.piece_bytes
    turns = max(EXTENT_BYTES // size, 1) if sizes.pause_s else 1
    places = _destination(turns * size).reshape(turns, sizes.warm_pieces, sizes.piece_tokens, LAYERS, TOPK)
    turn = itertools.count()

    def copies(source: list[npt.NDArray[np.generic]]) -> float:
        place = places[next(turn) % turns]

        def work() -> None:
            for index in range(sizes.warm_pieces):
                np.copyto(place[index], source[index % 2], casting="unsafe")

        return rate(size / 1e9, work)

    same, narrowed, memcpy, cast = interleaved(
        sizes.rounds,
        [
            _Appender(run, narrow, sizes.warm_pieces),
            _Appender(run, wide, sizes.warm_pieces),
            lambda: copies(narrow),
            lambda: copies(wide),
        ],
        sizes.pause_s,
    )
    return [
        against("append uint8, checksum included, to memcpy", same, memcpy, "GB/s", 0.65),
        against("append int32 narrowed to uint8, to numpy's cast", narrowed, cast, "GB/s", 0.70),
    ]


def _sustained(run: Run, sizes: Sizes) -> list[Row]:
    """Without pauses, so that fresh pages are zeroed on the way."""
    pieces = _payload(sizes, "uint8")
    session = run.session("sustained")
    step = session.step()
    count = 4 * sizes.pieces

    def work() -> None:
        for index in range(count):
            step.put("routed_experts", pieces[index % 2], start=index * sizes.piece_tokens)

    figure = rate(count * sizes.piece_bytes / 1e9, work)
    step.cancel()
    session.abort()
    return [Row("append uint8, sustained into fresh memory", figure, "GB/s", None, None, None)]


def _read(run: Run, sizes: Sizes) -> list[Row]:
    """A claimed segment's routing into a warm int32 buffer, against numpy's own widening copy."""
    pieces = _payload(sizes, "uint8")
    tokens = sizes.pieces * sizes.piece_tokens
    session = run.session("read")
    with session.step() as step:
        step.put("token_ids", np.zeros(tokens + 1, np.int32), start=0)
        for index in range(sizes.pieces):
            step.put("routed_experts", pieces[index % 2], start=index * sizes.piece_tokens)
    session.finalize()
    batch = run.claim(1)
    source = np.concatenate([pieces[index % 2] for index in range(sizes.pieces)])
    out = np.ones((tokens + 1, LAYERS, TOPK), np.int32)
    size = source.nbytes / 1e9

    def fetch() -> float:
        return rate(size, lambda: batch.fetch("routed_experts", out={"routed_experts": out}))

    def widen() -> float:
        return rate(size, lambda: np.copyto(out[:-1], source))

    ours, numpy = interleaved(sizes.rounds, [fetch, widen])
    fetch()
    if not np.array_equal(out[:-1], source):
        raise AssertionError("what was read is not what was written")
    batch.release()
    return [against("read back to int32, to numpy's own copy", ours, numpy, "GB/s stored", 0.80)]
