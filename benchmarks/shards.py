"""What four shards cost over one server: the same batch through both, phase by phase, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field as slot
from functools import partial

import numpy as np
import numpy.typing as npt
import psutil

import arrow_tq
from arrow_tq import fields
from arrow_tq.client import ClientOptions
from arrow_tq.producer.session import Session
from arrow_tq.producer.step import Step
from arrow_tq.runs import Run
from arrow_tq.trainer.batch import Batch
from benchmarks import servers
from benchmarks.report import Row
from benchmarks.sizes import EXPERTS, LAYERS, TOPK, Sizes, routing
from benchmarks.wire import WIRE

SHARDS = 4
TIMES_MAX = 1.2
"""Of one server's time, that four shards may take."""
WRITERS = 16
WARM_TURNS = 14
"""Until granted files are as large as they get, and their memory serves again."""
STEPS = 4
RANKS, TOKENS_A_MICRO_BATCH = 8, 32_768
CONTROL = ("commit", "compose", "claim", "plan", "release")
PHASES = ("put", *CONTROL, "fetch")


def rows(sizes: Sizes) -> list[Row]:
    """Wall time and processor time of every phase of a batch, of the control path together, and each way."""
    found: list[Row] = []
    for way, options in (("mapped", ClientOptions()), ("wire", WIRE)):
        with ExitStack() as stack:
            alone = Side(stack.enter_context(servers.cluster(0)), options, sizes, stack)
            many = Side(stack.enter_context(servers.cluster(SHARDS)), options, sizes, stack)
            # Files, connections and pages that a run has after its first batches.
            for _ in range(WARM_TURNS if sizes.rounds > 1 else 1):
                alone.turn()
                many.turn()
            alone.clear()
            many.clear()
            for index in range(sizes.rounds):
                for side in (alone, many) if index % 2 else (many, alone):
                    time.sleep(sizes.pause_s)
                    side.turn()
            found += _compare(way, alone, many)
    return found


def _compare(way: str, alone: Side, many: Side) -> list[Row]:
    found = []
    for name, phases in (("control path", CONTROL), *((phase, (phase,)) for phase in PHASES)):
        for kind in ("wall", "processor"):
            one, four = alone.median_ms(kind, phases), many.median_ms(kind, phases)
            target = 1 / TIMES_MAX if name in ("control path", "put", "fetch") else None
            label = f"{SHARDS} shards to one, {way}: {name}, {kind}"
            found.append(Row(label, four, "ms", one, one / max(four, 1e-6), target))
    return found


@dataclass
class Clock:
    """Wall time, and processor time of this process and of the servers, by phase and round, in seconds."""

    servers: Sequence[psutil.Process]
    wall: dict[str, list[float]] = slot(default_factory=dict)
    processor: dict[str, list[float]] = slot(default_factory=dict)

    def begin(self) -> None:
        """A new round."""
        for phase in PHASES:
            self.wall.setdefault(phase, []).append(0.0)
            self.processor.setdefault(phase, []).append(0.0)

    def measure(self, phase: str, work: Callable[[], object]) -> None:
        """Add one call to the round's figure of a phase."""
        used, began = self._used_s(), time.perf_counter()
        work()
        self.wall[phase][-1] += time.perf_counter() - began
        self.processor[phase][-1] += self._used_s() - used

    def _used_s(self) -> float:
        times = [process.cpu_times() for process in self.servers]
        return time.process_time() + sum(one.user + one.system for one in times)


class Side:
    """A store, and the batches that go through it."""

    def __init__(self, site: servers.Site, options: ClientOptions, sizes: Sizes, stack: ExitStack) -> None:
        self._store = stack.enter_context(arrow_tq.connect(site.url, options=options))
        self._pool = stack.enter_context(ThreadPoolExecutor(WRITERS))
        self._clock = Clock([psutil.Process(pid) for pid in site.pids])
        declared = [fields.token_ids(), fields.logprobs(), routing()]
        self._run: Run = self._store.run("shards", fields=declared)
        self._sessions = sizes.shard_sessions
        self._tokens = tokens = sizes.shard_turn_tokens
        random = np.random.default_rng(0)
        self._payload: dict[str, npt.NDArray[np.generic]] = {
            "token_ids": random.integers(0, 1 << 17, tokens, dtype=np.int32),
            "logprobs": random.random(tokens, np.float32),
            "routed_experts": random.integers(0, EXPERTS, (tokens, LAYERS, TOPK), dtype=np.uint8),
        }
        total = self._sessions * STEPS * tokens
        self._out: dict[str, npt.NDArray[np.generic]] = {
            "token_ids": np.ones(total, np.int32),
            "routed_experts": np.ones((total, LAYERS, TOPK), np.uint8),
        }
        self._round = 0

    def turn(self) -> None:
        """One batch: written, composed, claimed, planned, fetched, compared, released."""
        self._round += 1
        clock = self._clock
        clock.begin()
        sessions = list(self._pool.map(self._open, range(self._sessions)))
        for index in range(STEPS):
            steps = [self._step(session, index) for session in sessions]
            clock.measure("put", partial(self._all, partial(self._put, index), steps))
            clock.measure("commit", partial(self._all, Step.commit, steps))
        clock.measure("compose", lambda: self._all(Session.finalize, sessions))
        claimed: list[Batch] = []
        clock.measure("claim", lambda: claimed.append(self._run.claim(self._sessions)))
        (batch,) = claimed
        clock.measure("plan", lambda: batch.plan(TOKENS_A_MICRO_BATCH, rank=0, world=RANKS))
        clock.measure("fetch", lambda: batch.fetch(list(self._out), out=self._out))
        self._check()
        clock.measure("release", batch.release)

    def clear(self) -> None:
        """Forget what was measured."""
        self._clock.wall.clear()
        self._clock.processor.clear()

    def median_ms(self, kind: str, phases: Sequence[str]) -> float:
        """Of the rounds, these phases together; processor time, which is counted coarsely, as the mean."""
        figures = self._clock.wall if kind == "wall" else self._clock.processor
        by_round = np.sum([figures[phase] for phase in phases], axis=0)
        return 1e3 * float(np.median(by_round) if kind == "wall" else np.mean(by_round))

    def _all(self, work: Callable[..., object], items: Iterable[object]) -> None:
        list(self._pool.map(work, items))

    def _open(self, index: int) -> Session:
        return self._run.session(f"s-{self._round}-{index}")

    def _step(self, session: Session, index: int) -> Step:
        first = index * self._tokens
        return session.step(id=str(index), sampled=(first, first + self._tokens))

    def _put(self, index: int, step: Step) -> None:
        start = index * self._tokens
        for name, values in self._payload.items():
            # The last token of a session was never forwarded.
            last = name == "routed_experts" and index == STEPS - 1
            step.put(name, values[:-1] if last else values, start=start)
        step.flush()

    def _check(self) -> None:
        expected = self._payload["token_ids"]
        if not (self._out["token_ids"].reshape(-1, self._tokens) == expected).all():
            raise AssertionError("what was read is not what was written")
