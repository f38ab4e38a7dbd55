"""What going from one shard to four costs: a catalog with 1 shard and a catalog with 4, in turns.

The roles are the same on both sides; one server that is everything stands beside them. A batch is what a
training step sees of it: sessions opened, rows put, steps committed, sessions finalized, segments claimed,
micro-batches planned, manifests and chunks found, the batch released. Turns are a few tokens, so that what
is counted is the control path and not the moving of payload; rows "with payload" are put and fetch where
that is most of it, and have no target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field as slot
from functools import partial

import numpy as np
import numpy.typing as npt

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
"""Of what a catalog and one shard take, that a catalog and four may."""
WRITERS = 16
WARM_TURNS = 2
"""Files, connections and pages that a run has after its first batches."""
STEPS = 4
RANKS, TOKENS_A_MICRO_BATCH = 8, 32_768
PHASES = ("open", "put", "commit", "finalize", "claim", "plan", "fetch", "release")
WHOS = ("client", "catalog", "shards")


def rows(sizes: Sizes) -> list[Row]:
    """Wall and processor time a batch, together and by part, mapped and over the wire; by whose it is."""
    found: list[Row] = []
    small, large = sizes.shard_turn_tokens, sizes.shard_payload_tokens
    mapped = ClientOptions()
    for way, options, counts in (("mapped", mapped, (0, 1, SHARDS)), ("wire", WIRE, (1, SHARDS))):
        *one, few, many = _measured(sizes, small, options, counts)
        found += _compare(f"{way}: control path", few, many, PHASES, 1 / TIMES_MAX)
        found += _by_whom(f"{way}: control path", few, many)
        # Nothing is won by leaving shards out.
        found.append(Row(f"{way}: chunks on the fullest of {SHARDS}", many.share, "%", None, None, None))
        for phase in PHASES:
            found += _compare(f"{way}: {phase}", few, many, (phase,), None)
        found += [_row(f"catalog and 1 shard to one server, {way}: control path", side, few) for side in one]
    few, many = _measured(sizes, large, mapped, (1, SHARDS))
    for phase in ("put", "fetch"):
        found += _compare(f"mapped, with payload: {phase}", few, many, (phase,), None)
    return found


def _measured(sizes: Sizes, tokens: int, options: ClientOptions, shards: Sequence[int]) -> list[Side]:
    """Sides of so many shards (0: one server), each after the same rounds, in turns."""
    with ExitStack() as stack:
        sides = [
            Side(stack.enter_context(servers.cluster(count)), options, sizes, tokens, stack)
            for count in shards
        ]
        for _ in range(WARM_TURNS if sizes.shard_rounds > 1 else 1):
            for side in sides:
                side.turn()
        for side in sides:
            side.clock.clear()
        for index in range(sizes.shard_rounds):
            for side in sides if index % 2 else reversed(sides):
                time.sleep(sizes.shard_pause_s)
                side.turn()
        for side in sides:
            side.share = side.fullest()
        return sides


def _compare(label: str, few: Side, many: Side, phases: Sequence[str], target: float | None) -> list[Row]:
    found = []
    for kind in ("wall", "processor"):
        less, more = few.clock.median_ms(kind, phases), many.clock.median_ms(kind, phases)
        name = f"{SHARDS} shards to 1, {label}, {kind}"
        found.append(Row(name, more, "ms", less, less / max(more, 1e-6), target))
    return found


def _by_whom(label: str, few: Side, many: Side) -> list[Row]:
    found = []
    for who in WHOS:
        less, more = few.clock.median_ms(who, PHASES), many.clock.median_ms(who, PHASES)
        name = f"{SHARDS} shards to 1, {label}, processor of {who}"
        found.append(Row(name, more, "ms", less, less / max(more, 1e-6), None))
    return found


def _row(name: str, before: Side, after: Side) -> Row:
    less, more = before.clock.median_ms("processor", PHASES), after.clock.median_ms("processor", PHASES)
    return Row(f"{name}, processor", more, "ms", less, less / max(more, 1e-6), None)


@dataclass
class Clock:
    """Wall time and processor time by phase and round, in seconds; ``pids``: catalog first, then shards."""

    pids: Sequence[int]
    times: dict[tuple[str, str], list[float]] = slot(default_factory=dict)
    """By kind and phase: ``wall``, and the processor time of each of ``WHOS``."""

    def begin(self) -> None:
        """A new round."""
        for kind in ("wall", *WHOS):
            for phase in PHASES:
                self.times.setdefault((kind, phase), []).append(0.0)

    def clear(self) -> None:
        """Forget what was measured."""
        self.times.clear()

    def measure(self, phase: str, work: Callable[[], object]) -> None:
        """Add one call to the round's figure of a phase."""
        used, began = self._used_s(), time.perf_counter()
        work()
        self.times["wall", phase][-1] += time.perf_counter() - began
        for who, before, after in zip(WHOS, used, self._used_s(), strict=True):
            self.times[who, phase][-1] += after - before

    def median_ms(self, kind: str, phases: Sequence[str]) -> float:
        """Of the rounds, these phases together; ``processor`` is that of all processes."""
        kinds = WHOS if kind == "processor" else (kind,)
        by_round = np.sum([self.times[one, phase] for one in kinds for phase in phases], axis=0)
        return 1e3 * float(np.median(by_round))

    def _used_s(self) -> tuple[float, float, float]:
        catalog, *shards = map(_processor_s, self.pids)
        return time.process_time(), catalog, sum(shards)


def _processor_s(pid: int) -> float:
    """Processor time of another process, to the nanosecond: the id of its clock as Linux makes it."""
    return time.clock_gettime((~pid << 3) | 2)


class Side:
    """A store, and the batches that go through it; a turn of a session has ``tokens``."""

    def __init__(
        self, site: servers.Site, options: ClientOptions, sizes: Sizes, tokens: int, stack: ExitStack
    ) -> None:
        self._store = stack.enter_context(arrow_tq.connect(site.url, options=options))
        self._pool = stack.enter_context(ThreadPoolExecutor(WRITERS))
        self.clock = Clock(site.pids)
        declared = [fields.token_ids(), fields.logprobs(), routing()]
        self._run: Run = self._store.run("shards", fields=declared)
        self._sessions = sizes.shard_sessions
        self._tokens = tokens
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
        self.share = 0.0
        """Of the chunks, on the shard with most, in percent; once it was asked."""

    def turn(self) -> None:
        """One batch: written, composed, claimed, planned, fetched, compared, released."""
        self._round += 1
        clock = self.clock
        clock.begin()
        sessions: list[Session] = []
        clock.measure("open", lambda: sessions.extend(self._pool.map(self._open, range(self._sessions))))
        for index in range(STEPS):
            steps = [self._step(session, index) for session in sessions]
            clock.measure("put", partial(self._all, partial(self._put, index), steps))
            clock.measure("commit", partial(self._all, Step.commit, steps))
        clock.measure("finalize", lambda: self._all(Session.finalize, sessions))
        claimed: list[Batch] = []
        clock.measure("claim", lambda: claimed.append(self._run.claim(self._sessions)))
        (batch,) = claimed
        clock.measure("plan", lambda: batch.plan(TOKENS_A_MICRO_BATCH, rank=0, world=RANKS))
        clock.measure("fetch", lambda: batch.fetch(list(self._out), out=self._out))
        self._check()
        clock.measure("release", batch.release)

    def fullest(self) -> float:
        """See ``share``."""
        counts = self._run.sql("SELECT count(*) AS n FROM chunks GROUP BY shard").column("n").to_numpy()
        return 100 * float(counts.max() / counts.sum())

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
