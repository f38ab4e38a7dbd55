"""A batch of very many segments: its reference stays small, every rank sees one table."""

from __future__ import annotations

from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq_schemas.commands import CommitSteps, StepCommit, StepResults

TREES = 1000


@pytest.mark.parametrize("sessions", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_many_segments_have_a_small_reference(tmp_path: Path, sessions: int) -> None:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        run = store.run("large", fields=[fields.token_ids()])
        for number in range(sessions):
            session = run.session(f"s-{number}")
            # A tree of its own each, so that each is a segment; without rows, to be quick.
            steps = [
                StepCommit(run="large", epoch=0, session_id=session.id, step_id=f"{index}", parent="")
                for index in range(TREES)
            ]
            results = run.backend.execute(CommitSteps(steps=steps)).body
            assert isinstance(results, StepResults)
            assert not [one for one in results.results if one.error]
            assert len(session.finalize()) == TREES
        claimed = run.claim(sessions * TREES)
        assert len(claimed) == sessions * TREES
        assert len(claimed.ref.encode()) < 1024
        ranks = [run.attach(claimed.ref, rank=rank, world=64) for rank in (0, 63)]
        assert all(batch.table.equals(claimed.table) for batch in ranks)
        plans = [batch.plan(max_tokens=1000, seed=1) for batch in ranks]
        assert plans[0].rows_by_rank == plans[1].rows_by_rank
        assert {len(part[0]) for part in plans[0].rows_by_rank} <= {
            sessions * TREES // 64 + more for more in (0, 1)
        }
        assert store.stats()["bytes_read_total"] == 0
