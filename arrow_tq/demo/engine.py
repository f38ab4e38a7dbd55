"""The rollout engine of the training demonstration, a process of its own: bfloat16, records, stores.

``python -m arrow_tq.demo.engine`` reads orders as JSON lines from stdin, a ``Setup`` first, and answers each
``Generate`` with a ``Generated`` line on stdout. It ends with its stdin. Payload goes to the store alone.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

import arrow_tq
from arrow_tq.demo.model import RecordedModel, import_libraries
from arrow_tq.demo.rollouts import Rollout, RolloutPlan, rollouts
from arrow_tq.runs import Run
from arrow_tq_schemas.errors import ArrowTQError

DTYPE = "bfloat16"


class Setup(BaseModel):
    """Where to write, and what model to make."""

    url: str
    run: str
    plan: RolloutPlan
    threads: int


class Generate(BaseModel):
    """Make every rollout of the plan with these weights."""

    round: int
    version: str
    weights: str
    """A ``.safetensors`` file."""


class Generated(BaseModel):
    """What a round of rollouts was, and where its time went."""

    sessions: int
    tokens: int
    sampled: int
    generate_s: float
    """All of it, what follows included."""
    record_s: float
    """Copying what the routers chose."""
    put_routing_s: float
    """Handing the routing to the store."""
    put_other_s: float
    """Tokens, log-probs, and commits."""


class Engine:
    """Generates rounds of rollouts and writes each model call as it is made."""

    def __init__(self, setup: Setup, run: Run) -> None:
        torch, _ = import_libraries()
        torch.set_num_threads(setup.threads)
        self._plan = setup.plan
        self._run = run
        self._model = RecordedModel(setup.plan.model_shape(), setup.plan.seed, DTYPE)

    def generate(self, order: Generate) -> Generated:
        """One round; returns when its sessions are finalized."""
        self._model.load(Path(order.weights))
        plan = replace(self._plan, seed=self._plan.seed + order.round)
        began, recorded = time.perf_counter(), self._model.record_s
        answer = Generated(
            sessions=0, tokens=0, sampled=0, generate_s=0, record_s=0, put_routing_s=0, put_other_s=0
        )
        for rollout in rollouts(self._model, plan):
            self._write(rollout, order, answer)
            answer.sessions += 1
            answer.tokens += rollout.length
        answer.generate_s = time.perf_counter() - began
        answer.record_s = self._model.record_s - recorded
        return answer

    def _write(self, rollout: Rollout, order: Generate, answer: Generated) -> None:
        name = f"round-{order.round}"
        session = self._run.session(f"{name}/{rollout.session_id}", group=f"{name}/{rollout.group}")
        for index, call in enumerate(rollout.steps()):
            began = time.perf_counter()
            with session.step(
                id=f"call-{index}", messages=call.messages, version=order.version, sampled=call.sampled
            ) as step:
                step.put("token_ids", call.ids, start=call.start)
                step.put("logprobs", call.logprobs, start=call.sampled[0])
                routing = time.perf_counter()
                step.put("routed_experts", call.experts, start=call.experts_start)
                routing = time.perf_counter() - routing
            answer.put_routing_s += routing
            answer.put_other_s += time.perf_counter() - began - routing
            answer.sampled += len(call.logprobs)
        session.finalize(reward=rollout.reward)


def main() -> int:
    """Serve orders until stdin ends; exit code 1 where one could not be carried out."""
    try:
        setup = Setup.model_validate_json(sys.stdin.readline())
        with arrow_tq.connect(setup.url) as store:
            engine = Engine(setup, store.run(setup.run))
            for line in sys.stdin:
                answer = engine.generate(Generate.model_validate_json(line))
                sys.stdout.write(answer.model_dump_json() + "\n")
                sys.stdout.flush()
    except ArrowTQError as error:
        sys.stderr.write(f"error [{error.code}]: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
