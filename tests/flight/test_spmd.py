"""Ranks in processes of their own: one claims, all attach; DataLoader workers attach by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.client import ClientOptions
from arrow_tq.interface import Store
from arrow_tq.tensors import PlannedMicros, Source
from arrow_tq.testing.rollouts import declared_fields
from arrow_tq.testing.scenes import fill, wait_until
from tests.flight import spmd_rank
from tests.serving import Server

WORLD = 4


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    """A store that waits long for its connection to be let go: a busy machine forks slowly."""
    with arrow_tq.connect(server.url, options=ClientOptions(fork_wait_s=30.0)) as store:
        yield store


def test_four_ranks_plan_alike_and_resolve_what_they_moved(
    server: Server, store: Store, tmp_path: Path
) -> None:
    run = store.run(spmd_rank.RUN, fields=[*declared_fields(), fields.logprobs("old")])
    kept = fill(run, spmd_rank.SEGMENTS)
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.flight.spmd_rank",
                server.url,
                str(tmp_path),
                str(rank),
                str(WORLD),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(WORLD)
    ]
    answers = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err[-3000:]
        answers.append(json.loads(out.splitlines()[-1]))
    assert answers[0]["rows"] == answers[1]["rows"]
    assert answers[2]["rows"] == answers[3]["rows"]
    assert len(answers[0]["rows"]) == len(answers[2]["rows"])
    rows = [row for answer in (answers[0], answers[2]) for micro in answer["rows"] for row in micro]
    assert sorted(rows) == list(range(len(kept)))
    assert [answer["old"] for answer in answers][1::2] == [0, 0]
    assert sum(answer["old"] for answer in answers) == len(kept)
    states = run.sql("SELECT DISTINCT status FROM segments").column(0).to_pylist()
    assert states == ["done"]
    assert set(run.sql("SELECT DISTINCT state FROM chunks").column(0).to_pylist()) == {"released"}


@pytest.mark.parametrize(
    ("method", "workers"), [pytest.param("fork", 2, marks=pytest.mark.slow), ("spawn", 1), (None, 0)]
)
def test_loader_workers_share_a_plan(
    server: Server, store: Store, new_name: Callable[[], str], method: str | None, workers: int
) -> None:
    run = store.run(new_name(), fields=declared_fields())
    kept = fill(run, 6)
    batch = run.attach(run.claim(6).ref, rank=0, world=1)
    plan = batch.plan(max_tokens=100, seed=3)
    dataset = PlannedMicros(
        Source(server.url, run.name, batch.ref, 0, 1),
        ["token_ids", "routed_experts"],
        max_tokens=100,
        seed=3,
        layers=[9, 2],
        dtypes={"routed_experts": "int64"},
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)
    items = list(loader)
    assert [item["index"] for item in items] == list(range(len(plan)))
    for micro, item in zip(plan, items, strict=True):
        assert item["segment_ids"] == micro.segment_ids
        assert item["routed_experts"].dtype == torch.int64
        edges = item["cu_seqlens"].tolist()
        for start, end, name in zip(edges, edges[1:], micro.segment_ids, strict=False):
            np.testing.assert_array_equal(item["token_ids"][start:end], kept[name].tokens)
            np.testing.assert_array_equal(
                item["routed_experts"][start : end - 1], kept[name].experts[:, [5, 1]]
            )
    batch.release()


def test_loader_workers_need_a_server() -> None:
    with pytest.raises(errors.InvalidInput, match="connect to a server"):
        Source("runs/demo", "demo", "{}", 0, 1)


def test_late_values_survive_kill_9(tmp_path: Path) -> None:
    with Server(tmp_path / "data", tmp_path / "memory") as first, arrow_tq.connect(first.url) as store:
        run = store.run("k", fields=[*declared_fields(), fields.logprobs("old")])
        fill(run, 2)
        batch = run.claim(2)
        values = np.linspace(-1, 0, int(batch.num_tokens.sum()), dtype=np.float32)
        assert batch.put("old", values) == 2
        shown, ref = batch.fetch("old").packed("old").tolist(), batch.ref
        first.kill()
    with Server(tmp_path / "data", tmp_path / "memory") as second, arrow_tq.connect(second.url) as store:
        batch = store.run("k").attach(ref, rank=0, world=1)
        assert batch.fetch("old").packed("old").tolist() == shown
        assert batch.put("old", values) == 0
        batch.release()
        wait_until(lambda: store.stats()["chunks"] == 0)
