"""Whole ways through a catalog and four shards: the demonstration, agents at a proxy, bundles handed over."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.interface import Store
from arrow_tq_schemas.bundles import BundleRef
from arrow_tq_schemas.ids import ChunkId
from tests.clusters import Cluster
from tests.proxy import processes
from tests.proxy.conftest import RUN, SIZES
from tests.proxy.replay import Rollout, Tally, Upset, check, needs_trajectories, play, trajectories

SHARDS = {1, 2, 3, 4}
AGENTS = 24

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "four", len(SHARDS)) as running:
        yield running
        for server in [*running.shards, running.catalog]:
            assert server.stop() == 0
            assert "handler failed" not in server.log.read_text()


@pytest.fixture
def store(four: Cluster) -> Iterator[Store]:
    with arrow_tq.connect(four.url) as opened:
        yield opened


def shards_of(store: Store, run: str) -> set[int]:
    return set(store.run(run).sql("SELECT DISTINCT shard FROM chunks").column(0).to_pylist())


class DemoCluster:
    """In the place of the demonstration's own server."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory

    def __enter__(self) -> DemoCluster:
        return self

    def __exit__(self, *_: object) -> None:
        """What runs there is stopped by who started it."""


def test_the_demonstration(
    four: Cluster, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model, its router recorded; claimed here and fetched in another process, bit for bit."""
    pytest.importorskip("torch", reason="needs the extra demo")
    pytest.importorskip("transformers", reason="needs the extra demo")
    from arrow_tq.demo import show
    from arrow_tq.demo.rollouts import RolloutPlan

    monkeypatch.setattr(show, "DemoServer", lambda: DemoCluster(four.url, tmp_path))
    out = io.StringIO()
    plan = RolloutPlan(prompts=3, samples=2, turns=2, prompt_tokens=300, result_tokens=120, answer_tokens=6)
    assert show.run_demo(plan, Console(file=out, width=120, highlight=False)) == 0, out.getvalue()
    assert "6 rollouts, 12 model calls" in out.getvalue()
    assert shards_of(store, show.RUN) == SHARDS


@needs_trajectories
@pytest.mark.parametrize("routing", ["payload", "receipts"])
def test_agents_at_a_proxy(four: Cluster, store: Store, tmp_path: Path, routing: str) -> None:
    """Recorded trajectories by many agents at a time, every value compared with the engine's."""
    declared = fields.routed_experts(layers=SIZES.layers, topk=SIZES.topk, num_experts=SIZES.experts)
    run = store.run(RUN, fields=[fields.token_ids(), fields.logprobs(), declared])
    tally = Tally()
    rollouts = [Rollout(n, line, Upset(), 4, tally) for n, line in enumerate(trajectories(AGENTS))]
    shape = [f"--{name}={getattr(SIZES, name)}" for name in ("layers", "topk", "experts")]
    base = "/sglang" if routing == "payload" else "/recorded"
    recorder = ["--store", four.url, "--run", RUN]
    log = tmp_path / "proxy.log"
    with (
        processes.upstream(tmp_path / "upstream.log", *shape, *recorder) as upstream,
        processes.proxy(log, upstream.url + base, four.url, RUN, "--routing", routing) as proxy,
    ):
        processes.wait_until_ready(proxy.url)
        asyncio.run(play(proxy.url, rollouts, at_once=AGENTS))
        assert proxy.stop() == 0
    assert "handler failed" not in log.read_text()
    seen = check(run, rollouts, SIZES)
    assert seen["segments"] >= tally.counts["finalized"] > 15
    assert shards_of(store, RUN) == SHARDS


TAKE = """
import sys, numpy as np, arrow_tq
from tests.cluster.test_cluster_end_to_end import handed_over
from arrow_tq.testing.bundles import same
with arrow_tq.connect(sys.argv[1]) as store:
    for seed, ref in enumerate(sys.argv[2:]):
        same(handed_over(seed), store.get_bundle(ref))
        part = store.get_bundle(ref, fields=["tokens"])["tokens"]
        assert all(np.array_equal(one, other) for one, other in zip(part, handed_over(seed)["tokens"]))
        store.delete_bundle(ref)
print("taken")
"""


def handed_over(seed: int) -> dict[str, object]:
    """What a rollout manager gives to a trainer: 64 samples of some thousand tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(500, 2000, 64)
    return {
        "tokens": [random.integers(0, 1 << 17, length, dtype=np.int32) for length in lengths],
        "experts": [random.integers(0, 128, (length - 1, 8, 4), dtype=np.int32) for length in lengths],
        "reward": random.random(64).tolist(),
        "names": [f"sample-{seed}-{index}" for index in range(64)],
    }


def test_bundles_go_from_process_to_process(four: Cluster, store: Store) -> None:
    refs = [store.put_bundle(handed_over(seed)) for seed in range(12)]
    numbers = {ChunkId.from_hex(BundleRef.parse(ref).bundle_id).shard for ref in refs}
    assert numbers <= SHARDS and len(numbers) > 1
    done = subprocess.run(
        [sys.executable, "-c", TAKE, four.url, *refs],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "taken", done.stderr[-2000:]
    for ref in refs:
        with pytest.raises(errors.NotFound):
            store.get_bundle(ref)
