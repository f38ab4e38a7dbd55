"""What the head of a rollout holds: whole payloads through Ray, against references through it.

``python -m benchmarks.peers.head_memory [--trajectories N] [--tokens T] [--json FILE]``

The same actors, in processes of their own, twice. Whole: the proxy decodes what an engine answered, the
manager collects a batch of samples, every trainer takes the batch and copies out its part, as in slime
and Miles. By reference: the proxy stores each answer, the manager claims, each trainer fetches its part.
Peak PSS of each component is sampled over the run, so that shared memory is counted once; to our server's
are added the files in its memory directory, whoever maps them.

The public figures to compare with are those of Dressage's TransferQueue: 757 to 247 GiB on the head
node, 67 % less. Here the head is what does not scale with the cluster: proxy, manager and, where payload
goes through it, Ray's object store.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import ray
from rich.console import Console
from rich.table import Table

import arrow_tq
from arrow_tq import fields
from benchmarks import servers
from benchmarks.peers import peaks as peak_tables
from benchmarks.peers.driving import QUIET_RAY
from benchmarks.report import Row, describe, machine, stop_cleanly, write
from benchmarks.sizes import FULL, SMOKE

LAYERS, TOPK, EXPERTS = 40, 8, 256
SAMPLE_S = 0.02
TRAINERS = 2
HEAD, ONE_NODE = "head", "head, were the store on its node"
STORE = "arrow-tq server and its files"
TARGET = 0.85
Experts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """How much one run moves."""

    trajectories: int
    tokens: int

    @property
    def int32_bytes(self) -> int:
        """Of all routing, as an engine sends it before base64."""
        return self.trajectories * self.tokens * LAYERS * TOPK * 4

    @property
    def title(self) -> str:
        return (
            f"{self.trajectories} trajectories of {self.tokens:,} tokens, {LAYERS} layers, top {TOPK}: "
            f"{self.int32_bytes / 1e9:.2f} GB of int32 routing as the engine sends it"
        )


def answer(index: int, tokens: int) -> tuple[npt.NDArray[np.int32], bytes]:
    """What an engine answers: token ids, and routing as base64 of int32."""
    random = np.random.default_rng(index)
    experts = random.integers(0, EXPERTS, (tokens - 1, LAYERS, TOPK), dtype=np.int32)
    return random.integers(0, 150_000, tokens, dtype=np.int32), base64.b64encode(experts.tobytes())


def _decoded(routing: bytes) -> Experts:
    return np.frombuffer(base64.b64decode(routing), np.int32).reshape(-1, LAYERS, TOPK)


class Proxy:
    """Between engine and agents."""

    def __init__(self, url: str | None) -> None:
        self._run = None if url is None else arrow_tq.connect(url).run("head")

    def pid(self) -> int:
        return os.getpid()

    def whole(self, index: int, tokens: int) -> dict[str, object]:
        ids, routing = answer(index, tokens)
        return {"tokens": ids, "rollout_routed_experts": _decoded(routing)}

    def reference(self, index: int, tokens: int) -> str:
        assert self._run is not None
        ids, routing = answer(index, tokens)
        session = self._run.session(f"s-{index}")
        with session.step() as step:
            step.put("token_ids", ids, start=0)
            step.put("routed_experts", _decoded(routing), start=0)
        (segment,) = session.finalize()
        return segment.segment_id


class Manager:
    """Collects a batch and hands it to the trainers."""

    def __init__(self, url: str | None) -> None:
        self._run = None if url is None else arrow_tq.connect(url).run("head")

    def pid(self) -> int:
        return os.getpid()

    def whole(self, samples: list[object]) -> list[object]:
        """The batch's reference, boxed so that Ray does not resolve it on the way."""
        rows: list[dict[str, object]] = ray.get(samples)
        batch = {name: [row[name] for row in rows] for name in rows[0]}
        return [ray.put(batch)]

    def reference(self, segments: list[str]) -> str:
        assert self._run is not None
        self._batch = self._run.claim(len(segments))
        return self._batch.ref


class Trainer:
    """A data parallel rank."""

    def __init__(self, url: str | None, rank: int) -> None:
        self._rank = rank
        self._run = None if url is None else arrow_tq.connect(url).run("head")

    def pid(self) -> int:
        return os.getpid()

    def whole(self, box: list[object]) -> int:
        batch = ray.get(box[0])
        mine = batch["rollout_routed_experts"][self._rank :: TRAINERS]
        return int(np.concatenate(mine).sum(dtype=np.int64))

    def reference(self, ref: str) -> int:
        assert self._run is not None
        batch = self._run.attach(ref, rank=self._rank, world=TRAINERS)
        part = batch.select(list(range(self._rank, batch.table.num_rows, TRAINERS)))
        data = part.fetch(["routed_experts"])
        total = sum(int(rows.sum(dtype=np.int64)) for rows in data["routed_experts"])
        data.close()
        return total


class Sampler:
    """Peak PSS by component, sampled in the background."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._pids = pids
        self.peak_bytes = dict.fromkeys([*pids, HEAD, ONE_NODE], 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop)

    def __enter__(self) -> Sampler:
        self._first = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _now(self) -> dict[str, int]:
        found = {name: sum(_pss(pid) for pid in pids) for name, pids in self._pids.items()}
        if STORE in found:
            # What clients wrote in its memory directory is mapped by none of its processes.
            found[STORE] += sum(_files(pid) for pid in self._pids[STORE])
        head = found["proxy"] + found["manager"] + found.get("object store", 0)
        return {**found, HEAD: head, ONE_NODE: sum(found.values()) - found["trainers"]}

    def _loop(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for name, size in self._now().items():
                self.peak_bytes[name] = max(self.peak_bytes[name], size - self._first[name])


def _pss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0


def _files(pid: int) -> int:
    """Bytes of the files in a server's memory directory, whoever maps them."""
    try:
        arguments = psutil.Process(pid).cmdline()
    except psutil.Error:
        return 0
    folder = Path(arguments[arguments.index("--memory-dir") + 1])
    size = 0
    for path in folder.rglob("*"):
        # A file may go between its listing and a look at it.
        with contextlib.suppress(OSError):
            size += path.stat().st_blocks * 512
    return size


def _raylets() -> list[int]:
    return [one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == "raylet"]


def run(shape: Shape, url: str | None, store_pids: list[int]) -> dict[str, int]:
    """One run; peak bytes by component over what each had before it."""
    proxy = ray.remote(Proxy).remote(url)
    manager = ray.remote(Manager).remote(url)
    trainers = [ray.remote(Trainer).remote(url, rank) for rank in range(TRAINERS)]
    pids = {
        "proxy": [ray.get(proxy.pid.remote())],
        "manager": [ray.get(manager.pid.remote())],
        "trainers": ray.get([trainer.pid.remote() for trainer in trainers]),
        **({"object store": _raylets()} if url is None else {STORE: store_pids}),
    }
    with Sampler(pids) as sampler:
        box = _whole(shape, proxy, manager) if url is None else _by_reference(shape, proxy, manager)
        verb = "whole" if url is None else "reference"
        sums = ray.get([getattr(trainer, verb).remote(box) for trainer in trainers])
    expected = sum(
        int(_decoded(answer(index, shape.tokens)[1]).sum(dtype=np.int64))
        for index in range(shape.trajectories)
    )
    if sum(sums) != expected:
        raise AssertionError("the trainers did not get what the engine answered")
    for actor in (proxy, manager, *trainers):
        ray.kill(actor)
    return sampler.peak_bytes


def _whole(shape: Shape, proxy: ray.actor.ActorHandle, manager: ray.actor.ActorHandle) -> object:
    samples = [proxy.whole.remote(index, shape.tokens) for index in range(shape.trajectories)]
    # In a list, so that the manager takes the references and gets them itself.
    return ray.get(manager.whole.remote(samples))


def _by_reference(shape: Shape, proxy: ray.actor.ActorHandle, manager: ray.actor.ActorHandle) -> object:
    segments = [proxy.reference.remote(index, shape.tokens) for index in range(shape.trajectories)]
    return ray.get(manager.reference.remote(ray.get(segments)))


def measure(shape: Shape) -> dict[str, tuple[int | None, int | None]]:
    """Peak bytes by component, with whole payloads and with references; None: not there."""
    os.environ.update(QUIET_RAY)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=6 << 30)
    try:
        whole = run(shape, None, [])
        with servers.ours() as url:
            pids = [one.pid for one in psutil.Process().children() if "arrow_tq_server" in one.cmdline()]
            with arrow_tq.connect(url) as store:
                store.run("head", fields=[fields.token_ids(), fields.routed_experts(LAYERS, TOPK, EXPERTS)])
                reference = run(shape, url, pids)
    finally:
        ray.shutdown()
    names = sorted(dict.fromkeys([*whole, *reference]), key=(HEAD, ONE_NODE).count)
    return {name: (whole.get(name), reference.get(name)) for name in names}


def rows(peaks: Mapping[str, Sequence[int | None]]) -> list[Row]:
    """The shares saved."""
    found = []
    for name, target in ((HEAD, TARGET), (ONE_NODE, None)):
        before, after = peaks[name]
        assert before and after is not None
        title = f"{name}: memory saved, references for whole payloads"
        found.append(
            Row(title, after / peak_tables.MIB, "MiB", before / peak_tables.MIB, 1 - after / before, target)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--smoke", action="store_true", help="do not spend time on the machine line")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    stop_cleanly()
    shape = Shape(chosen.trajectories, chosen.tokens)
    sizes = SMOKE if chosen.smoke else FULL
    about = machine(sizes.touch_bytes, sizes.touch_away_s)
    peaks = measure(shape)
    console = Console(width=max(100, Console().width))
    console.print(describe(about))
    shown = Table(*peak_tables.HEADERS, title=shape.title)
    for line in peak_tables.table(peaks):
        shown.add_row(*line)
    console.print(shown)
    if chosen.json:
        write(chosen.json, rows(peaks), about, title=shape.title, peaks=peaks)


if __name__ == "__main__":
    main()
