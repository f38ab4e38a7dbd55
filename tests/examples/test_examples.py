"""The examples run as they are printed, and the documents' code is code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import arrow_tq
from arrow_tq import fields
from tests.proxy import processes
from tests.proxy.agents import check_segments
from tests.proxy.conftest import RUN, SIZES
from tests.proxy.processes import ROOT
from tests.serving import Server, quiet_ports

DOCS = ROOT / "docs"
PROMPT = list(b"A prompt of some tokens")


def test_an_engine_with_a_recorder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "recorder_in_engine.py"), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "every value equal" in done.stdout


def test_a_proxy_of_ones_own(tmp_path: Path) -> None:
    """Two turns through it, over sockets, with a real engine's protocol behind it."""
    with (
        Server(tmp_path / "data", tmp_path / "memory") as server,
        processes.upstream(tmp_path / "upstream.log") as upstream,
        arrow_tq.connect(server.url) as store,
    ):
        routing = fields.routed_experts(layers=SIZES.layers, topk=SIZES.topk, num_experts=SIZES.experts)
        run = store.run(RUN, fields=[fields.token_ids(), fields.logprobs(), routing])
        (port,) = quiet_ports(1)
        where = [
            "--upstream",
            f"{upstream.url}/sglang",
            "--store",
            server.url,
            "--run",
            RUN,
            "--port",
            str(port),
        ]
        process = subprocess.Popen([sys.executable, str(ROOT / "examples" / "own_proxy.py"), *where])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url)
            prompt = list(PROMPT)
            for turn in range(2):
                body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 9}}
                headers = {"x-session": "s-1", "x-call": f"call-{turn}"}
                response = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=30)
                assert response.status_code == 200, response.text
                assert "routed_experts" not in response.json()["meta_info"]
                prompt += [*response.json()["output_ids"], *b" and more"]
            refused = httpx.post(f"{url}/generate", json={"input_ids": [1]}, headers={"x-session": "s-1"})
            assert refused.status_code != 200
            done = httpx.post(f"{url}/sessions/s-1/finalize", json={"reward": 1.0})
            assert done.json()[0]["loss_tokens"] == 18
        finally:
            process.terminate()
            process.wait(20)
        (row,) = check_segments(run, "s-1")
        assert row["token_ids"] == prompt[: -len(b" and more")]


@pytest.mark.parametrize("page", ["proxy.md", "proxy-writers.md"])
def test_the_pages_code_is_code(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_metrics_page_names_every_metric() -> None:
    from arrow_tq.proxy.metrics import PREFIX, Metrics

    page = (DOCS / "proxy.md").read_text()
    names = {metric.name.removeprefix(PREFIX) for metric in Metrics().registry.collect()}
    assert all(name in page for name in names), names


def wait_for(url: str) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            httpx.get(url)
        except httpx.TransportError:
            assert time.monotonic() < until
            time.sleep(0.1)
        else:
            return
