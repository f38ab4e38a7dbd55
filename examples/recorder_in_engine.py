"""An engine's scheduler that records routing by itself, and an agent's step that attaches the receipts.

    python examples/recorder_in_engine.py runs/recorded

The "model" here is arithmetic; the calls are those that a scheduler makes: ``begin`` when a request is
taken, ``append`` after each forward pass, ``finish`` when it is done. No payload leaves the engine: what
travels is a receipt of a few hundred bytes.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

import arrow_tq
from arrow_tq import fields
from arrow_tq.recorder import Recorder
from arrow_tq.runs import Run

LAYERS, TOPK, EXPERTS = 12, 4, 64
PROMPT = np.arange(200, 264, dtype=np.int32)
SAMPLED = 40


def routed(tokens: npt.NDArray[np.int32], first: int) -> npt.NDArray[np.int64]:
    """``[tokens, layers, topk]``: what the routers of one forward pass chose."""
    base = tokens[:, None] * 7 + np.arange(first, first + len(tokens))[:, None] + np.arange(LAYERS)
    return (base[:, :, None] + 3 * np.arange(TOPK)) % EXPERTS


def serve_one(recorder: Recorder) -> tuple[npt.NDArray[np.int32], list[str]]:
    """A request in the scheduler: prefill, then token after token. Gives all tokens, and receipts."""
    request = recorder.begin("cmpl-1")
    tokens = PROMPT
    request.append("routed_experts", 0, routed(tokens, 0))
    for _ in range(SAMPLED - 1):
        tokens = np.append(tokens, np.int32(len(tokens) % 100))
        request.append("routed_experts", len(tokens) - 1, routed(tokens[-1:], len(tokens) - 1))
    # The last token is sampled, and never forwarded: it has no row.
    tokens = np.append(tokens, np.int32(7))
    receipts = request.finish(kept=len(tokens) - 1)
    return tokens, [receipt.to_json() for receipt in receipts.values()]


def step_of(run: Run, tokens: npt.NDArray[np.int32], receipts: list[str]) -> None:
    """The proxy's side: tokens are its own, routing is attached by receipt."""
    session = run.session("s-1")
    with session.step(id="call-1", sampled=(len(PROMPT), len(tokens))) as step:
        step.put("token_ids", tokens, start=0)
        for receipt in receipts:
            step.attach(receipt)
    session.finalize(reward=1.0)


def main(folder: str) -> None:
    with arrow_tq.open(folder) as store:
        experts = fields.routed_experts(layers=LAYERS, topk=TOPK, num_experts=EXPERTS)
        run = store.run("recorded", fields=[fields.token_ids(), experts])
        recorder = Recorder(run, ["routed_experts"])
        tokens, receipts = serve_one(recorder)
        recorder.close()
        step_of(run, tokens, receipts)
        batch = run.claim(1)
        data = batch.fetch(["routed_experts"])
        np.testing.assert_array_equal(data["routed_experts"][0], routed(tokens[:-1], 0))
        size = sum(map(len, receipts))
        print(
            f"{data['routed_experts'].nbytes} bytes of routing, {size} bytes of receipts, every value equal"
        )
        batch.release()


if __name__ == "__main__":
    main(sys.argv[1])
