"""What routing replay costs a training step: the demonstration's loop, at a size that shows shares."""

from __future__ import annotations

import io
import statistics

from rich.console import Console

from arrow_tq.demo.rollouts import RolloutPlan
from arrow_tq.demo.training import TrainingPlan
from arrow_tq.demo.training_show import OVERHEAD_TARGET, failures, run_training
from benchmarks.report import Row, ceiling
from benchmarks.sizes import Sizes


def rows(sizes: Sizes) -> list[Row]:
    """Recording, storing, reading and replaying routing, as a share of the step without them.

    The first step warms up and is left out where there are others.
    """
    rollouts = RolloutPlan(
        prompts=2, samples=4, turns=2, prompt_tokens=sizes.prompt_tokens, result_tokens=100, answer_tokens=16
    )
    plan = TrainingPlan(rollouts=rollouts, steps=sizes.train_steps)
    reports = run_training(plan, Console(file=io.StringIO()))
    wrong = failures(reports)
    if wrong:
        raise AssertionError("; ".join(wrong))
    measured = reports[1:] or reports
    overhead = statistics.median(report.replay_overhead for report in measured)
    step_s = statistics.median(report.step_s for report in measured)
    return [
        ceiling("routing replay, to the rest of the step", 100 * overhead, "%", 100 * OVERHEAD_TARGET),
        Row("a training step with replay", step_s, "s", None, None, None),
    ]
