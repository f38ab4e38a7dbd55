"""GRPO steps on a small Qwen3-MoE with rollout routing replay through an arrow-tq server.

    python examples/replay_rl.py --steps 5

Three processes: a server, a rollout engine in bfloat16, and this one, the trainer in float32. Each model
call of the engine is a step in the store; the trainer claims whole groups, fetches tokens and log-probs,
and gives its routers the experts that the engine's chose, in the old-log-prob forward, the training
forward and the recomputation. ``--lag 1`` lets the engine run one round ahead, with weights one version old.

The parts to take from: arrow_tq/demo/engine.py (writing), arrow_tq/demo/training.py (claiming, fetching,
updating) and arrow_tq/demo/replayed.py (the hooks).
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from arrow_tq.demo.rollouts import RolloutPlan
from arrow_tq.demo.training import TrainingPlan
from arrow_tq.demo.training_show import print_verdict, run_training
from arrow_tq_schemas.errors import ArrowTQError


def main() -> int:
    """Train, and say whether replay kept its promise."""
    parser = argparse.ArgumentParser(description="GRPO steps with rollout routing replay.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4, help="rollouts a prompt: one group")
    parser.add_argument("--prompt-tokens", type=int, default=250)
    parser.add_argument("--result-tokens", type=int, default=100, help="tokens of a tool's result")
    parser.add_argument("--answer-tokens", type=int, default=16, help="sampled tokens a turn at most")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--lag", type=int, default=0, help="rounds that the engine is ahead")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rollouts = RolloutPlan(
        prompts=given.prompts,
        samples=given.samples,
        turns=given.turns,
        seed=given.seed,
        prompt_tokens=given.prompt_tokens,
        result_tokens=given.result_tokens,
        answer_tokens=given.answer_tokens,
    )
    console = Console(highlight=False, soft_wrap=True)
    plan = TrainingPlan(rollouts=rollouts, steps=given.steps, lag=given.lag)
    try:
        return print_verdict(console, run_training(plan, console))
    except ArrowTQError as error:
        sys.stderr.write(f"error [{error.code}]: {error.message}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
