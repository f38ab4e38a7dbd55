"""``arrow-tq demo``: the whole path on one machine, measured and checked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from arrow_tq.demo.consumer import Findings, Order
from arrow_tq.demo.model import RecordedModel
from arrow_tq.demo.rollouts import Rollout, RolloutPlan, rollouts
from arrow_tq.demo.server import DemoServer
from arrow_tq_schemas import presets
from arrow_tq_schemas.errors import InternalError

if TYPE_CHECKING:
    import pyarrow as pa

    from arrow_tq.interface import Store
    from arrow_tq.runs import Run

RUN = "demo"
CHECK_S = 120.0
"""How long the consumer may take."""
QUESTIONS = (
    (
        "How do the groups fare?",
        "SELECT group_id, count(*) AS samples, round(avg(reward), 3) AS reward, max(num_tokens) AS longest\n"
        "FROM segments GROUP BY 1 ORDER BY 1",
    ),
    (
        "Where do the bytes go?",
        "SELECT field, count(*) AS chunks, sum(rows)::BIGINT AS rows, sum(bytes)::BIGINT AS bytes,\n"
        "       round(100 * sum(bytes) / sum(sum(bytes)) OVER (), 1) AS percent\n"
        "FROM chunks GROUP BY 1 ORDER BY bytes DESC",
    ),
    (
        "How much was sampled in each turn?",
        "SELECT step_index AS turn, count(*) AS calls, sum(sampled_end - sampled_start)::BIGINT AS sampled,\n"
        "       max(num_tokens) AS longest_context\n"
        "FROM steps GROUP BY 1 ORDER BY 1",
    ),
)


@dataclass(slots=True)
class Produced:
    """What the producer wrote, and how long that took."""

    steps: int = 0
    sampled: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    put_s: float = 0.0
    """Time in puts and commits; the model's time is not in it."""
    truth: dict[str, str] = field(default_factory=dict)


def run_demo(plan: RolloutPlan, console: Console | None = None) -> int:
    """Run the demonstration; 0 if every value came back as the model produced it, else 1.

    Raises:
        Unsupported: a package is missing; names the extra to install.
        InternalError: the server or the consumer failed.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    with clean_on_signals(), DemoServer() as server:
        import arrow_tq

        console.print(f"server    {server.url} (a process of its own)")
        model = RecordedModel(plan.model_shape(), plan.seed)
        shape = model.shape
        console.print(
            f"model     Qwen3-MoE, random weights, {model.parameters / 1e6:.1f} M parameters, "
            f"{shape.moe_layers} MoE layers, top {shape.topk} of {shape.experts} experts"
        )
        with arrow_tq.connect(server.url) as store:
            fields = [presets.token_ids(), presets.logprobs(), shape.routed_experts()]
            run = store.run(RUN, fields=fields)
            produced = _produce(run, model, plan, server.directory, console)
            findings, ref_bytes = _consume(run, server.url, produced)
            _report(console, produced, findings, ref_bytes)
            for title, query in QUESTIONS:
                _answer(console, store, title, query)
    return _verdict(console, findings, time.monotonic() - started)


def _produce(
    run: Run, model: RecordedModel, plan: RolloutPlan, directory: Path, console: Console
) -> Produced:
    produced = Produced()
    count = plan.prompts * plan.samples
    with console.status("generating") as status:
        for index, rollout in enumerate(rollouts(model, plan)):
            status.update(f"generating: rollout {index + 1} of {count}")
            _write(run, rollout, produced)
            truth = directory / f"truth-{index}.npz"
            rollout.canvas.save(truth, rollout.length)
            produced.truth[rollout.session_id] = str(truth)
            produced.tokens += rollout.length
    return produced


def _write(run: Run, rollout: Rollout, produced: Produced) -> None:
    """One rollout as a session: each model call is a step, committed before the next begins."""
    session = run.session(rollout.session_id, group=rollout.group)
    for index, call in enumerate(rollout.steps()):
        began = time.perf_counter()
        with session.step(
            id=f"call-{index}", messages=call.messages, version="0", sampled=call.sampled
        ) as step:
            step.put("token_ids", call.ids, start=call.start)
            step.put("logprobs", call.logprobs, start=call.sampled[0])
            step.put("routed_experts", call.experts, start=call.experts_start)
        produced.put_s += time.perf_counter() - began
        produced.steps += 1
        produced.sampled += len(call.logprobs)
        produced.payload_bytes += call.nbytes
    session.finalize(reward=rollout.reward)


def _consume(run: Run, url: str, produced: Produced) -> tuple[Findings, int]:
    """Claim everything here, and hand the reference to a process that fetches and checks."""
    batch = run.claim(len(produced.truth))
    order = Order(url=url, run=run.name, ref=batch.ref, truth=produced.truth)
    command = [sys.executable, "-m", "arrow_tq.demo.consumer"]
    consumer = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = consumer.communicate(order.model_dump_json(), timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        raise InternalError(f"the consumer did not end in {CHECK_S:.0f} s") from None
    finally:
        if consumer.poll() is None:
            consumer.kill()
            consumer.wait()
    if consumer.returncode != 0:
        last = err.strip().splitlines()[-1] if err.strip() else "no message"
        raise InternalError(f"the consumer ended with code {consumer.returncode}: {last}")
    return Findings.model_validate_json(out), len(batch.ref.encode())


def _report(console: Console, produced: Produced, findings: Findings, ref_bytes: int) -> None:
    megabytes = produced.payload_bytes / 1e6
    console.print(
        f"produced  {len(produced.truth)} rollouts, {produced.steps} model calls, "
        f"{produced.tokens:,} tokens, {produced.sampled:,} of them sampled"
    )
    console.print(
        f"put       {megabytes:.2f} MB in {produced.put_s:.2f} s: {megabytes / produced.put_s:.1f} MB/s, "
        f"{1e3 * produced.put_s / produced.steps:.1f} ms a model call (three puts and a commit)"
    )
    fetched = findings.payload_bytes / 1e6
    console.print(
        f"get       {fetched:.2f} MB in {findings.fetch_s:.3f} s: {fetched / findings.fetch_s:.1f} MB/s, "
        "by reference, in another process"
    )
    console.print(
        f"reference {ref_bytes} bytes stand for the batch: "
        f"1 byte for {produced.payload_bytes // ref_bytes:,} of payload"
    )


def _answer(console: Console, store: Store, title: str, query: str) -> None:
    console.print(f"\n{title}", style="bold")
    console.print(query, style="dim", markup=False)
    console.print(_rich_table(store.sql(query, run=RUN)))


def _rich_table(answer: pa.Table) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in answer.column_names:
        table.add_column(name, justify="right")
    for row in answer.to_pylist():
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    return table


def _verdict(console: Console, findings: Findings, elapsed_s: float) -> int:
    console.print()
    if findings.differences:
        for line in findings.differences:
            console.print(f"differs: {line}", style="red", markup=False)
        console.print("FAILED: the store gave back other values than the model produced", style="bold red")
        return 1
    console.print(
        f"OK: {findings.values:,} values of {findings.segments} segments are bit for bit what the model "
        f"produced ({elapsed_s:.0f} s in all)",
        style="bold green",
    )
    return 0


@contextmanager
def clean_on_signals() -> Iterator[None]:
    """SIGTERM ends the demonstration as an exception, so that everything is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
