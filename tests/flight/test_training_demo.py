"""The training loop in small: three processes, real updates, routing replayed; facts, not timings."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("torch", reason="needs the extra demo")
pytest.importorskip("transformers", reason="needs the extra demo")

import numpy as np

from arrow_tq.demo.comparison import Comparison
from arrow_tq.demo.grpo import advantages
from arrow_tq.demo.rollouts import RolloutPlan
from arrow_tq.demo.training import StepReport, TrainingPlan
from arrow_tq.demo.training_show import failures, print_verdict, run_training
from tests.flight.test_demo import left_behind, scratch

__all__ = ["scratch"]

SMALL = RolloutPlan(prompts=1, samples=3, turns=2, prompt_tokens=240, result_tokens=80, answer_tokens=8)


def test_replay_gives_the_trainer_the_rollouts_experts(scratch: Path) -> None:
    """Two steps; the engine is a round ahead, so the second step's rollouts are one version old."""
    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False)
    reports = run_training(TrainingPlan(rollouts=SMALL, steps=2, lag=1, micro_batch=2, threads=1), console)
    assert [report.version for report in reports] == ["0", "1"]
    assert [report.staleness for report in reports] == [0, 1]
    for report in reports:
        seen = report.comparison
        assert report.coverage == 1.0
        assert seen.differ_off > 0, "bfloat16 changes no route here: the test shows nothing"
        assert seen.differ_on == 0
        # Two micro-batches, four layers: old log-probs, training forward, recomputation; one fetch each.
        assert report.reads == 3 * 2 * 4
        assert report.fetches == 2
        assert seen.forwarded == report.tokens - 3
    fresh = reports[0].comparison
    assert fresh.gap_on < fresh.gap_off
    # What is left is what two dtypes make of the same routes.
    assert fresh.gap_on < 3 * fresh.rounding
    assert failures(reports) == []
    assert print_verdict(console, reports) == 0
    text = out.getvalue()
    assert "with replay none" in text
    assert "routing: record" in text
    assert left_behind(scratch) == []


def test_a_broken_promise_is_told(scratch: Path) -> None:
    good = Comparison(10, 3, 0, 0.1, 5, 0.02, 0.01, 0.01, 0.2, 0.1, 0.01)
    step = StepReport(0, "0", 0.5, 11, 1.0, good, 0, 2.0, 0.01, 0.01, 0.01, 0.01, 0.1, 24, 2)
    assert failures([step]) == []
    assert round(step.replay_overhead, 4) == 0.0204
    wrong = replace(step, coverage=0.5, comparison=replace(good, differ_on=2, gap_on=0.03))
    assert len(failures([wrong])) == 3
    out = io.StringIO()
    assert print_verdict(Console(file=out, width=160), [wrong]) == 1
    assert "FAILED: replay did not give the trainer the rollout's experts" in out.getvalue()
    stale = replace(step, staleness=1, comparison=replace(good, gap_on=0.03))
    assert failures([stale]) == [], "an older policy's log-probs differ for a reason of their own"
    assert print_verdict(Console(file=out, width=160), []) == 1


def test_advantages_are_relative_to_the_group() -> None:
    found = advantages([1.0, 0.0, 5.0, 5.0], ["a", "a", "b", "b"])
    np.testing.assert_allclose(found, [1, -1, 0, 0], atol=1e-3)
    assert found.dtype == np.float32
