"""Commands that run something: a server, the demonstration, the benchmarks."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from arrow_tq_schemas.errors import Unsupported

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of commands whose arguments another program reads."""
ENTRY_POINTS = "arrow_tq.commands"
"""Entry points of functions that serve as typer commands; loaded only when they are called."""


def serve(context: typer.Context) -> None:
    """Serve a store over Arrow Flight (see its --help)."""
    found = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == "serve"]
    if not found:
        raise Unsupported("serve: the server is not part of this installation")
    try:
        function = found[0].load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("arrow_tq"):
            raise
        missing = f"serve: the module {error.name} is missing: pip install 'arrow-tq[server]'"
        raise Unsupported(missing) from None
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command()(function)
    command(context.args, prog_name="arrow-tq serve")


def proxy(context: typer.Context) -> None:
    """Record an engine's calls on their way (see its --help)."""
    try:
        from arrow_tq.proxy.main import proxy as function
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("arrow_tq"):
            raise
        missing = f"proxy: the module {error.name} is missing: pip install 'arrow-tq[proxy]'"
        raise Unsupported(missing) from None
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command()(function)
    command(context.args, prog_name="arrow-tq proxy")


def demo(
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Prompts.")] = 4,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Rollouts a prompt.")] = 4,
    turns: Annotated[int, typer.Option(min=1, max=16, help="Model calls a rollout.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the sampling.")] = 0,
    steps: Annotated[int, typer.Option(min=0, max=1000, help="Training steps that replay routing.")] = 3,
) -> None:
    """Show the whole path: a server, rollouts of a real MoE model, a trainer that checks every value.

    Then training steps whose routers choose the experts that the rollouts' chose.
    """
    from arrow_tq.cli.stores import log_to_stderr
    from arrow_tq.demo.rollouts import RolloutPlan
    from arrow_tq.demo.show import run_demo
    from arrow_tq.demo.training_show import demonstrate_training

    log_to_stderr()
    code = run_demo(RolloutPlan(prompts=prompts, samples=samples, turns=turns, seed=seed))
    raise typer.Exit(code or demonstrate_training(steps, seed))


def bench(context: typer.Context) -> None:
    """Run the benchmarks of a source tree (arguments go to python -m benchmarks)."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").exists():
        raise Unsupported("bench: the benchmarks are in the source tree, not in this installation")
    command = [sys.executable, "-m", "benchmarks", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)
