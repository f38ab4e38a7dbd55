"""``arrow-tq demo``, second part: a training loop that replays routing, and what that does."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from arrow_tq.demo.engine import Setup
from arrow_tq.demo.engine_process import EngineProcess
from arrow_tq.demo.rollouts import RolloutPlan
from arrow_tq.demo.server import DemoServer
from arrow_tq.demo.show import clean_on_signals
from arrow_tq.demo.training import StepReport, Training, TrainingPlan
from arrow_tq_schemas import presets

RUN = "replay"
OVERHEAD_TARGET = 0.03
STEP_MIN_S = 1.0
"""Shorter steps are all fixed costs, and say nothing about a share."""

LEGEND = """\
differ: tokens that the trainer would give other experts than the rollout, in some layer, without and with
replay. gap: mean |log-prob of the rollout - of the trainer| over sampled tokens; agreeing: the same without
replay where the token's own experts agree; rounding: bfloat16 to float32 in the trainer alone, routes
replayed in both, which no replay can remove. stale: weight versions behind, from SQL."""


def run_training(plan: TrainingPlan, console: Console | None = None) -> list[StepReport]:
    """Start a server and a rollout engine, train, and print what each step shows.

    Raises:
        Unsupported: a package is missing; names the extra to install.
        InternalError: the server or the engine failed.
    """
    import arrow_tq

    console = console or Console(highlight=False, soft_wrap=True)
    with DemoServer() as server, arrow_tq.connect(server.url) as store:
        shape = plan.rollouts.model_shape()
        run = store.run(RUN, [presets.token_ids(), presets.logprobs(), shape.routed_experts()])
        setup = Setup(url=server.url, run=RUN, plan=plan.rollouts, threads=plan.threads)
        with EngineProcess(setup) as engine:
            console.print(
                f"training  rollouts in bfloat16 in one process, updates in float32 in another; "
                f"{shape.moe_layers} MoE layers, top {shape.topk} of {shape.experts} experts"
            )
            with console.status("training"):
                reports = list(Training(plan, run, engine, server.directory).steps())
        _print_steps(console, reports)
        _print_chain(console, reports)
    return reports


def demonstrate_training(steps: int, seed: int, console: Console | None = None) -> int:
    """A few steps of a size that shows shares; 0 if replay kept its promise."""
    if not steps:
        return 0
    console = console or Console(highlight=False, soft_wrap=True)
    rollouts = RolloutPlan(
        prompts=2, samples=4, turns=2, seed=seed, prompt_tokens=250, result_tokens=100, answer_tokens=16
    )
    console.print()
    with clean_on_signals():
        reports = run_training(TrainingPlan(rollouts=rollouts, steps=steps), console)
    return print_verdict(console, reports)


def failures(reports: Sequence[StepReport]) -> list[str]:
    """What replay promised and did not keep; empty where all is well."""
    found = []
    for report in reports:
        seen = report.comparison
        if report.coverage != 1.0:
            found.append(
                f"step {report.step}: {report.coverage:.2%} of the tokens have routing, expected all"
            )
        if seen.differ_on:
            found.append(f"step {report.step}: {seen.differ_on} tokens got other experts with replay on")
        if not report.staleness and not seen.gap_on < seen.gap_off:
            found.append(
                f"step {report.step}: the log-prob gap is {seen.gap_on:.2g} with replay, "
                f"{seen.gap_off:.2g} without"
            )
    return found


def print_verdict(console: Console, reports: Sequence[StepReport]) -> int:
    """The last line; 0 if replay kept its promise in every step, else 1."""
    wrong = failures(reports)
    for line in wrong:
        console.print(f"differs: {line}", style="red", markup=False)
    if wrong or not reports:
        console.print("FAILED: replay did not give the trainer the rollout's experts", style="bold red")
        return 1
    forwarded = sum(report.comparison.forwarded for report in reports)
    off = sum(report.comparison.differ_off for report in reports)
    console.print(
        f"OK: {off:,} of {forwarded:,} tokens would have got other experts in the trainer; with replay none",
        style="bold green",
    )
    return 0


def _print_steps(console: Console, reports: Sequence[StepReport]) -> None:
    console.print(
        "step  reward  tokens  coverage   differ: off     on   gap: off      on  agreeing  rounding  stale"
    )
    for report in reports:
        seen = report.comparison
        forwarded = max(seen.forwarded, 1)
        console.print(
            f"{report.step:>4}  {report.reward:>6.3f}  {report.tokens:>6,}  {report.coverage:>8.0%}   "
            f"{seen.differ_off / forwarded:>11.1%}  {seen.differ_on / forwarded:>5.1%}   "
            f"{seen.gap_off:>8.5f} {seen.gap_on:>8.5f}  {seen.gap_agreeing:>8.5f}  {seen.rounding:>8.5f}  "
            f"{report.staleness:>5}"
        )
    console.print(LEGEND, style="dim")


def _print_chain(console: Console, reports: Sequence[StepReport]) -> None:
    for report in reports:
        short = "" if report.step_s >= STEP_MIN_S else f" (under {STEP_MIN_S:.0f} s: fixed costs)"
        parts = [
            f"record {_ms(report.record_s)}",
            f"store {_ms(report.store_s)}",
            f"read {_ms(report.read_s)} ({report.fetches} fetches)",
            f"replay {_ms(report.replay_s)} ({report.reads} reads)",
        ]
        console.print(
            f"step {report.step}    {report.step_s:.2f} s{short}; routing: {', '.join(parts)}: "
            f"{report.replay_overhead:.2%} of the rest; tokens, log-probs, commits: "
            f"{_ms(report.other_store_s)}"
        )
    long = [report.replay_overhead for report in reports if report.step_s >= STEP_MIN_S]
    if long:
        console.print(f"overhead  {min(long):.2%} to {max(long):.2%}, target < {OVERHEAD_TARGET:.0%}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
