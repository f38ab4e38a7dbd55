"""One store server and one engine's double for all of these tests, and a proxy for each engine's protocol."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from tests.proxy import processes
from tests.proxy.processes import Process
from tests.proxy.upstream_engine import Sizes
from tests.serving import Server

SIZES = Sizes(layers=4, topk=4, experts=64)
RUN = "proxied"


@dataclass(frozen=True, slots=True)
class Lab:
    """What the tests talk to."""

    server: Server
    upstream: Process
    store: Store
    run: Run
    folder: Path


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("proxy")
    with Server(folder / "data", folder / "memory", "--set", "orphan_ttl_s=3") as server:
        store = arrow_tq.connect(server.url)
        routing = fields.routed_experts(layers=SIZES.layers, topk=SIZES.topk, num_experts=SIZES.experts)
        run = store.run(RUN, fields=[fields.token_ids(), fields.logprobs(), routing])
        with processes.upstream(folder / "upstream.log", "--store", server.url, "--run", RUN) as upstream:
            yield Lab(server, upstream, store, run, folder)
        store.close()
        assert server.stop() == 0
        assert "handler failed" not in server.log.read_text()


def started(lab: Lab, name: str, base: str, *arguments: str) -> Process:
    log = lab.folder / f"{name}.log"
    proxy = processes.proxy(log, lab.upstream.url + base, lab.server.url, RUN, *arguments)
    processes.wait_until_ready(proxy.url)
    return proxy


@pytest.fixture(scope="session")
def sglang(lab: Lab) -> Iterator[Process]:
    with started(lab, "sglang", "/sglang") as proxy:
        yield proxy
        assert proxy.stop() == 0
        assert "handler failed" not in proxy.log.read_text()


@pytest.fixture(scope="session")
def vllm(lab: Lab) -> Iterator[Process]:
    with started(lab, "vllm", "/vllm", "--engine", "vllm") as proxy:
        yield proxy
        assert proxy.stop() == 0
        assert "handler failed" not in proxy.log.read_text()


@pytest.fixture(scope="session")
def new_session() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"rollout/{next(numbers)}"
