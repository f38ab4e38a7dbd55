"""A server that is killed while late values are put: each segment shows all of its rows or none."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.testing.rollouts import declared_fields
from arrow_tq.testing.scenes import fill, wait_until
from arrow_tq.trainer import late
from tests.serving import Server

SEGMENTS = 40


def test_a_put_that_was_cut_off_is_put_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "SEGMENTS_PER_CALL", 4)
    with Server(tmp_path / "data", tmp_path / "memory") as first, arrow_tq.connect(first.url) as store:
        run = store.run("k", fields=[*declared_fields(), fields.logprobs("old")])
        fill(run, SEGMENTS)
        batch = run.claim(SEGMENTS)
        values = np.linspace(-1, 0, int(batch.num_tokens.sum()), dtype=np.float32)
        ref = batch.ref
        shown = threading.Event()
        plain = run.backend.execute

        def counted(command):  # type: ignore[no-untyped-def]
            reply = plain(command)
            if command.verb == "put_values":
                shown.set()
            return reply

        monkeypatch.setattr(run.backend, "execute", counted)
        killer = threading.Thread(target=lambda: (shown.wait(60), first.kill()))
        killer.start()
        with contextlib.suppress(errors.Unavailable):
            batch.put("old", values)
        killer.join()
        assert shown.is_set()
    with Server(tmp_path / "data", tmp_path / "memory") as second, arrow_tq.connect(second.url) as store:
        run = store.run("k")
        batch = run.attach(ref, rank=0, world=1)
        complete = run.sql("SELECT segment_id FROM segments WHERE list_contains(complete_fields, 'old')")
        names = complete.column(0).to_pylist()
        assert len(names) % 4 == 0
        assert names
        sampled = fields_of(batch, values)
        rows = [batch.segment_ids.index(name) for name in names]
        for row, data in zip(rows, batch.fetch("old", rows=rows).sampled("old"), strict=True):
            np.testing.assert_array_equal(data, sampled[row])
        assert batch.put("old", values) == SEGMENTS - len(names)
        for row, data in enumerate(batch.fetch("old").sampled("old")):
            np.testing.assert_array_equal(data, sampled[row])
        batch.release()
        wait_until(lambda: store.stats()["chunks"] == 0)


def fields_of(batch: arrow_tq.trainer.batch.Batch, values: np.ndarray) -> list[np.ndarray]:
    """By segment, the packed values at its sampled positions."""
    ends = np.cumsum(batch.num_tokens)
    found = []
    for manifest, end in zip(batch.manifests(), ends.tolist(), strict=True):
        own = values[end - manifest.num_tokens : end]
        found.append(np.concatenate([own[start:stop] for start, stop in manifest.sampled.tolist()]))
    return found
