"""A training loop over the store: rollouts in one process, updates in this one, routing replayed in between.

A step claims a round of rollouts, fetches tokens and log-probs, computes old log-probs and the loss with the
recorded routing replayed, updates the weights, and publishes them. Beside that it measures, on the weights
of the step and outside its time, what would have been without replay.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay import MicroBatchRouting, RankLayout, RoutingSource
from arrow_tq.adapters.replay.samples import SampleValues, sample_values
from arrow_tq.demo.comparison import Comparison, compare
from arrow_tq.demo.engine import Generate, Generated
from arrow_tq.demo.engine_process import EngineProcess
from arrow_tq.demo.grpo import advantages, policy_loss
from arrow_tq.demo.model import import_libraries
from arrow_tq.demo.replayed import ReplayedModel
from arrow_tq.demo.rollouts import RolloutPlan
from arrow_tq.runs import Run
from arrow_tq.trainer.batch import Batch

COVERAGE = """
SELECT coalesce(sum(covered), 0)::DOUBLE / sum(num_tokens - 1) AS coverage
FROM segments LEFT JOIN (
    SELECT segment_id, sum(rows) AS covered FROM spans WHERE field = 'routed_experts' GROUP BY 1
) USING (segment_id) WHERE session_id LIKE 'round-{round}/%'
"""
"""Share of the forwarded tokens that have routing."""
STALENESS = """
SELECT max(r.policy_version::INT - s.version_min::INT) AS staleness
FROM segments s JOIN runs r USING (run) WHERE s.session_id LIKE 'round-{round}/%'
"""
"""Weight versions between the oldest token of a round and the trainer; versions are numbers here."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How much to train.

    Attributes:
        rollouts: what a round of rollouts is.
        steps: updates.
        lag: rounds that the engine is ahead; 0: each round has the newest weights.
        micro_batch: sequences of one forward.
        learning_rate: of Adam.
        threads: of torch, in each of the two processes. More than there are idle cores spin, and measure
            nothing.
    """

    rollouts: RolloutPlan
    steps: int = 3
    lag: int = 0
    micro_batch: int = 4
    learning_rate: float = 1e-3
    threads: int = 1


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step was. Times in seconds; log-prob gaps are mean absolute differences."""

    step: int
    version: str
    """Version of the weights that were updated."""
    reward: float
    tokens: int
    coverage: float
    comparison: Comparison
    staleness: int
    step_s: float
    """Rollouts, old log-probs, update, publishing; without the comparison."""
    record_s: float
    store_s: float
    """Handing routing to the store."""
    read_s: float
    """Fetching it."""
    replay_s: float
    """Weighing the recorded experts in the trainer's routers."""
    other_store_s: float
    """Tokens, log-probs, commits, claim: what a store costs with or without routing."""
    reads: int
    """How often a layer's routing was read for a micro-batch."""
    fetches: int
    """How often a micro-batch's routing was fetched."""

    @property
    def replay_overhead(self) -> float:
        """Time of recording, storing, reading and replaying routing, as a share of the step without it."""
        chain = self.record_s + self.store_s + self.read_s + self.replay_s
        return chain / (self.step_s - chain)


class Training:
    """The loop. Its run, engine process and directory are its caller's."""

    def __init__(self, plan: TrainingPlan, run: Run, engine: EngineProcess, directory: Path) -> None:
        torch, _ = import_libraries()
        torch.set_num_threads(plan.threads)
        self._torch = torch
        self._plan = plan
        self._run = run
        self._engine = engine
        self._directory = directory
        shape = plan.rollouts.model_shape()
        self._shape = shape
        self._model = ReplayedModel(shape, plan.rollouts.seed)
        self._rounded = ReplayedModel(shape, plan.rollouts.seed, "bfloat16")
        self._optimizer = torch.optim.Adam(self._model.model.parameters(), lr=plan.learning_rate)
        self._version = 0
        self._weights = Path()
        self._ready: deque[Generated] = deque()
        self._rounds = 0

    def steps(self) -> Iterator[StepReport]:
        """Train; a report after each step."""
        self._publish()
        for step in range(self._plan.steps):
            yield self._step(step)

    def _step(self, step: int) -> StepReport:
        made, version = self._rollouts(step), str(self._version)
        began = time.perf_counter()
        plan = self._plan.rollouts
        batch = self._run.claim(made.sessions, group_size=plan.samples, unit="group", wait_s=10)
        claim_s = time.perf_counter() - began
        with RoutingSourceOf(batch) as source:
            micros = self._micro_batches(batch, source)
            other_s = sum(micro.other_s for micro in micros)
            routing_s = sum(micro.routing_s for micro in micros)
            waited = time.perf_counter()
            comparison = compare(self._model, self._rounded, micros)
            staleness, coverage = self._ask(STALENESS, step), self._ask(COVERAGE, step)
            compared_s = time.perf_counter() - waited
            self._model.replay_s, self._model.reads = 0.0, 0
            self._update(batch, micros)
            fetches = source.fetches
        batch.release()
        self._publish()
        report_s = time.perf_counter() - began - compared_s
        return StepReport(
            step=step,
            version=version,
            reward=float(np.mean(batch.table["reward"].to_numpy())),
            tokens=sum(len(values.tokens) for micro in micros for values in micro.values),
            coverage=float(coverage),
            comparison=comparison,
            staleness=int(staleness),
            step_s=made.generate_s + report_s,
            record_s=made.record_s,
            store_s=made.put_routing_s,
            read_s=routing_s,
            replay_s=self._model.replay_s,
            other_store_s=made.put_other_s + claim_s + other_s,
            reads=self._model.reads,
            fetches=fetches,
        )

    def _rollouts(self, step: int) -> Generated:
        """The step's round; the engine is told of as many rounds as it may be ahead."""
        while self._rounds <= min(step + self._plan.lag, self._plan.steps - 1):
            order = Generate(round=self._rounds, version=str(self._version), weights=str(self._weights))
            self._ready.append(self._engine.generate(order))
            self._rounds += 1
        return self._ready.popleft()

    def _micro_batches(self, batch: Batch, source: RoutingSource) -> list[MicroBatch]:
        """The batch in order of length, so that sequences of a micro-batch need little padding."""
        order = np.argsort(batch.table["num_tokens"].to_numpy(), kind="stable")
        size = self._plan.micro_batch
        return [
            MicroBatch.fetch(batch, source, order[first : first + size].tolist(), self._shape.layer_ids)
            for first in range(0, len(order), size)
        ]

    def _update(self, batch: Batch, micros: Sequence[MicroBatch]) -> None:
        gain = advantages(batch.table["reward"].to_pylist(), batch.table["group_id"].to_pylist())
        total = sum(float(micro.mask.sum()) for micro in micros)
        old = []
        with self._model.no_grad():
            for micro in micros:
                with self._model.replaying(micro.routing):
                    old.append(self._model.token_logprobs(micro.tokens))
        self._optimizer.zero_grad()
        for micro, before in zip(micros, old, strict=True):
            mask = self._torch.from_numpy(micro.mask)
            weight = self._torch.from_numpy(gain[micro.rows])
            with self._model.replaying(micro.routing):
                logprobs = self._model.token_logprobs(micro.tokens)
                loss = policy_loss(self._torch, logprobs, before, weight, mask)
                self._model.backward(loss * (float(micro.mask.sum()) / total))
        self._torch.nn.utils.clip_grad_norm_(self._model.model.parameters(), 1.0)
        self._optimizer.step()
        self._version += 1

    def _publish(self) -> None:
        """The weights as a file that the engine loads, and their version in the store."""
        self._weights = self._directory / f"weights-{self._version}.safetensors"
        self._model.save(self._weights)
        self._run.set_policy_version(str(self._version))

    def _ask(self, query: str, step: int) -> Any:
        return self._run.sql(query.format(round=step)).column(0)[0].as_py()


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rows of a batch, padded on the right to one length.

    Attributes:
        rows: rows of the batch.
        values: the samples.
        tokens: int64 ``[sequences, length]``.
        logprobs: float32 ``[sequences, length]`` of the rollout engine, 0 where nothing was sampled.
        mask: float32 ``[sequences, length]``, 1 where a token carries loss.
        routing: the routing, laid out like ``tokens``.
        other_s, routing_s: time of fetching tokens and log-probs, and of fetching routing.
    """

    rows: list[int]
    values: list[SampleValues]
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.float32]
    routing: MicroBatchRouting
    other_s: float
    routing_s: float

    @classmethod
    def fetch(cls, batch: Batch, source: RoutingSource, rows: list[int], layers: Sequence[int]) -> MicroBatch:
        began = time.perf_counter()
        values = sample_values(batch, rows)
        length = max(len(one.tokens) for one in values)
        tokens = np.zeros((len(rows), length), np.int64)
        logprobs = np.zeros((len(rows), length), np.float32)
        mask = np.zeros((len(rows), length), np.float32)
        for place, one in enumerate(values):
            end = len(one.tokens)
            start = end - one.response_length
            tokens[place, :end] = one.tokens
            logprobs[place, start:end] = one.logprobs
            mask[place, start:end] = one.loss_mask
        fetched = time.perf_counter()
        routing = source.micro_batch(rows, RankLayout(sequence_rows=length), layers)
        routing.experts()
        done = time.perf_counter()
        return cls(rows, values, tokens, logprobs, mask, routing, fetched - began, done - fetched)


class RoutingSourceOf:
    """A ``RoutingSource`` as a context manager."""

    def __init__(self, batch: Batch) -> None:
        self._source = RoutingSource(batch, device="cpu")

    def __enter__(self) -> RoutingSource:
        return self._source

    def __exit__(self, *_: object) -> None:
        self._source.close()
