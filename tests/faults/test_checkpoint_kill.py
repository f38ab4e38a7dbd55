"""SIGKILL of a trainer between its marks, and of the server; after the rewind all of it is there again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors
from arrow_tq.testing.rollouts import Rollout
from arrow_tq.testing.scenes import fill, open_run
from tests.serving import Server
from tests.warm import WarmProcess

TRAINER = """
import sys, arrow_tq
run = arrow_tq.connect(sys.argv[1]).run("demo")
for step in range(1, 100):
    batch = run.claim(2, lease_s=600, wait_s=30)
    batch.fetch(["token_ids", "routed_experts"])
    print("claimed", *batch.segment_ids, flush=True)
    sys.stdin.readline()
    batch.release()
    if step % 3 == 0:
        run.mark(f"step-{step}")
"""
MARKS_EVERY, CLAIMS = 6, 2
"""Segments between two marks of that trainer, and in one of its claims."""


def train(url: str, claims: int) -> list[str]:
    """A trainer that is killed while it holds its claim number ``claims``; the segments it saw, in order."""
    with WarmProcess("-c", TRAINER, url) as process:
        seen: list[str] = []
        for number in range(claims):
            if number:
                process.stdin.write("go\n")
                process.stdin.flush()
            word, *names = process.stdout.readline().split()
            assert (word, len(names)) == ("claimed", CLAIMS)
            seen += names
    return seen


def check_restored(url: str, seen: list[str], kept: dict[str, Rollout]) -> None:
    """What the trainer saw since its last mark is claimable, and reads as it was written; nothing else is."""
    marked = (len(seen) - CLAIMS) // MARKS_EVERY * MARKS_EVERY
    with arrow_tq.connect(url) as store:
        old, run = store.run("demo"), store.run("demo")
        rewound = run.rewind(f"step-{marked // CLAIMS}")
        assert rewound.segments == seen[marked:]
        with pytest.raises(errors.StaleEpoch):
            old.claim(1)
        batch = run.claim(1000)
        assert batch.segment_ids == list(kept)[marked:]
        data = batch.fetch(["token_ids", "logprobs", "routed_experts"])
        for index, name in enumerate(batch.segment_ids):
            np.testing.assert_array_equal(data["token_ids"][index], kept[name].tokens)
            np.testing.assert_array_equal(data["logprobs"][index], kept[name].logprobs)
            np.testing.assert_array_equal(data["routed_experts"][index], kept[name].experts)
        done = run.sql("SELECT segment_id FROM segments WHERE status = 'done'").column(0).to_pylist()
        assert sorted(done) == sorted(seen[:marked])
        with pytest.raises(errors.ChunkReleased):
            run.table(seen[:marked], fields=["token_ids"])
        batch.release()


@pytest.mark.parametrize("claims", [5, 6])
def test_a_killed_trainer_goes_back_to_its_mark(tmp_path: Path, claims: int) -> None:
    with Server(tmp_path / "data", tmp_path / "memory") as server:
        with arrow_tq.connect(server.url) as store:
            kept = fill(open_run(store), 20)
        seen = train(server.url, claims)
        if claims == 6:
            server.kill()
        else:
            check_restored(server.url, seen, kept)
    if claims == 6:
        with Server(tmp_path / "data", tmp_path / "memory") as again:
            check_restored(again.url, seen, kept)
