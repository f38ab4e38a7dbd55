"""A real mixture-of-experts model behind the proxy: what it routed is what a trainer fetches."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import arrow_tq
from arrow_tq import fields
from tests.proxy import processes
from tests.proxy.agents import events, finalize, named
from tests.proxy.conftest import RUN
from tests.serving import Server

LAYERS, TOPK, EXPERTS = 3, 4, 16
PROMPT = list(b"def route(tokens):\n    return")


def direct(url: str, prompt: list[int], completion: list[int], start: int) -> tuple[Any, Any]:
    """Log-probs and routing, as the engine itself tells them of the same call."""
    body = {
        "input_ids": prompt, "replay": completion, "return_logprob": True, "return_routed_experts": True,
        "routed_experts_start_len": start,
    }  # fmt: skip
    meta = httpx.post(f"{url}/sglang/generate", json=body, timeout=60).json()["meta_info"]
    experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, LAYERS, TOPK)
    return [pair[0] for pair in meta["output_token_logprobs"]], experts


def test_a_real_models_routing_through_the_proxy(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data", tmp_path / "memory") as server,
        arrow_tq.connect(server.url) as store,
        processes.upstream(tmp_path / "upstream.log", "--model") as upstream,
    ):
        routing = fields.routed_experts(layers=LAYERS, topk=TOPK, num_experts=EXPERTS)
        run = store.run(RUN, fields=[fields.token_ids(), fields.logprobs(), routing])
        experts = np.full((512, LAYERS, TOPK), -1, np.int32)
        logprobs = np.zeros(512, np.float32)
        prompt, covered = list(PROMPT), 0
        log = tmp_path / "proxy.log"
        with processes.proxy(log, f"{upstream.url}/sglang", server.url, RUN) as proxy:
            for turn in range(3):
                body = {
                    "input_ids": prompt, "sampling_params": {"max_new_tokens": 12}, "seed": turn,
                    "stream": turn == 1,
                }  # fmt: skip
                response = httpx.post(f"{proxy.url}/generate", json=body, headers=named("s-1"), timeout=60)
                assert response.status_code == 200, response.text
                answer = events(response.content)[-1] if turn == 1 else response.json()
                completion = answer["output_ids"]
                chances, rows = direct(upstream.url, prompt, completion, covered)
                end = len(prompt) + len(completion)
                experts[covered : end - 1] = rows
                logprobs[len(prompt) : end] = chances
                prompt, covered = [*prompt, *completion, *b"\n# and then\n"], end - 1
            finalize(proxy.url, "s-1", reward=1.0)
            assert proxy.stop() == 0
        batch = run.claim(1)
        data = batch.fetch(["token_ids", "logprobs", "routed_experts"])
        tokens = data["token_ids"][0]
        np.testing.assert_array_equal(tokens, prompt[: -len(b"\n# and then\n")])
        np.testing.assert_array_equal(data["routed_experts"][0], experts[: len(tokens) - 1])
        np.testing.assert_array_equal(data["logprobs"][0], logprobs[: len(tokens)])
        batch.release()
