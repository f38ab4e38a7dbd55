"""Whole dicts from one process to another: our bundles against Ray's object store."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from benchmarks import servers
from benchmarks.report import Row
from benchmarks.sizes import Sizes

PUT_TARGET, GET_TARGET, LISTS_TARGET = 5.0, 5.0, 1.0
"""How many times faster than Ray."""


class Pair(Protocol):
    """A producer and a consumer, each a process of its own that holds the dict or asks for it."""

    def turn(self) -> tuple[float, float]:
        """Seconds of one put and of one get of what was put."""


def rows(sizes: Sizes) -> list[Row]:
    """Put and get of a train dict, rows as arrays and as lists."""
    found = []
    for lists in (False, True):
        kind = "list" if lists else "ndarray"
        ours, ray = _medians(sizes, lists)
        for verb, index, target in (("put", 0, PUT_TARGET), ("get", 1, GET_TARGET)):
            name = f"bundle {verb}, {kind} rows"
            value = ours[index] * 1e3
            if ray is None:
                why = "no Ray here" if _ray_is_missing() else "Ray left out"
                found.append(Row(f"{name}: {why}", value, "ms", None, None, None))
                continue
            baseline = ray[index] * 1e3
            wanted = LISTS_TARGET if lists else target
            found.append(Row(f"{name}, to Ray", value, "ms", baseline, baseline / value, wanted))
    return found


def train_dict(samples: int, lists: bool) -> dict[str, Any]:
    """Tokens of 334 on average, 256 of them a response; and the small fields of a train dict."""
    chance = np.random.default_rng(7)
    tokens = [
        chance.integers(0, 150_000, size).astype(np.int32) for size in chance.integers(206, 463, samples)
    ]
    ragged: dict[str, list[Any]] = {
        "tokens": tokens,
        "loss_masks": [np.ones(256, np.int32) for _ in range(samples)],
        "rollout_log_probs": [-chance.random(256).astype(np.float32) for _ in range(samples)],
    }
    if lists:
        ragged = {name: [row.tolist() for row in column] for name, column in ragged.items()}
    numbers = list(range(samples))
    return {
        **ragged,
        "response_lengths": [256] * samples,
        "total_lengths": [len(row) for row in tokens],
        "rewards": chance.random(samples).tolist(),
        "raw_reward": chance.random(samples).tolist(),
        "truncated": [0] * samples,
        "sample_indices": numbers,
        "rollout_ids": numbers,
        "rollout_mask_sums": [256] * samples,
        "partition": numbers,
        "num_microbatches": [4, 4],
        "micro_batch_indices": [[index, index + 1] for index in range(0, min(samples, 64), 2)],
        "global_batch_sizes": [samples],
    }


def _medians(sizes: Sizes, lists: bool) -> tuple[tuple[float, float], tuple[float, float] | None]:
    """Median seconds of put and get, ours and Ray's, all taking turns."""
    with our_pair(sizes, lists) as ours, ray_pair(sizes, lists) as ray:
        pairs: list[Pair] = [ours] if ray is None else [ours, ray]
        for pair in pairs:
            # The first turn imports, connects and maps.
            pair.turn()
        times: list[list[tuple[float, float]]] = [[] for _ in pairs]
        for _ in range(sizes.rounds):
            for index, pair in enumerate(pairs):
                time.sleep(sizes.pause_s)
                times[index].append(pair.turn())
    medians = [
        (statistics.median(put for put, _ in some), statistics.median(get for _, get in some))
        for some in times
    ]
    return medians[0], medians[1] if ray is not None else None


# -- ours ------------------------------------------------------------------------------------------


class _Ours:
    def __init__(self, producer: subprocess.Popen[str], consumer: subprocess.Popen[str]) -> None:
        self._producer = producer
        self._consumer = consumer

    def turn(self) -> tuple[float, float]:
        put_s, ref = _say(self._producer, "put")
        get_s, _ = _say(self._consumer, f"get {ref}")
        _say(self._producer, f"delete {ref}")
        return put_s, get_s


@contextmanager
def our_pair(sizes: Sizes, lists: bool) -> Iterator[Pair]:
    """A server, a producer and a consumer: three processes, over TCP."""
    with servers.ours() as url:
        arguments = [url, str(sizes.bundle_samples), str(int(lists))]
        peers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.bundle_peer", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            yield _Ours(*peers)
        finally:
            for peer in peers:
                assert peer.stdin is not None
                peer.stdin.close()
                peer.wait(servers.STOP_S)


def _say(peer: subprocess.Popen[str], line: str) -> tuple[float, str]:
    assert peer.stdin is not None and peer.stdout is not None
    peer.stdin.write(line + "\n")
    peer.stdin.flush()
    seconds, ref = json.loads(peer.stdout.readline())
    return float(seconds), str(ref)


# -- Ray -------------------------------------------------------------------------------------------


def _ray_is_missing() -> bool:
    return importlib.util.find_spec("ray") is None


@contextmanager
def ray_pair(sizes: Sizes, lists: bool) -> Iterator[Pair | None]:
    """Two actors on one node; None where Ray is not there, or not wanted."""
    if _ray_is_missing() or not sizes.with_ray:
        yield None
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=4, object_store_memory=2 << 30, **quiet)
    try:
        yield _Ray(ray, sizes.bundle_samples, lists)
    finally:
        ray.shutdown()


class _Box:
    """What slime puts around a reference, so that Ray does not fetch it for the caller."""

    def __init__(self, inner: object) -> None:
        self.inner = inner


class _Ray:
    def __init__(self, ray: Any, samples: int, lists: bool) -> None:
        self._ray = ray

        class Producer:
            def __init__(self) -> None:
                self.value = train_dict(samples, lists)

            def put(self) -> tuple[float, _Box]:
                started = time.perf_counter()
                box = _Box(ray.put(self.value))
                return time.perf_counter() - started, box

        class Consumer:
            def get(self, box: _Box) -> float:
                started = time.perf_counter()
                value = ray.get(box.inner)
                seconds = time.perf_counter() - started
                assert len(value["tokens"]) == samples
                return seconds

        self._producer = ray.remote(Producer).remote()
        self._consumer = ray.remote(Consumer).remote()

    def turn(self) -> tuple[float, float]:
        put_s, box = self._ray.get(self._producer.put.remote())
        return put_s, self._ray.get(self._consumer.get.remote(box))
