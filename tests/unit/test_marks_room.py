"""What a mark keeps gives its room up before new sessions wait for long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arrow_tq import Field, errors, fields
from arrow_tq.interface import Store
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.testing.scenes import wait_until

ROW_BYTES = 4096


def write(run: object, name: str, rows: int) -> None:
    session = run.session(name, wait_s=20)  # type: ignore[attr-defined]
    with session.step(sampled=(0, rows)) as step:
        step.put("token_ids", np.arange(rows), start=0)
        step.put("wide", np.zeros((rows, ROW_BYTES), np.uint8), start=0)
    session.finalize()


@pytest.mark.parametrize("soft_mark", [0.1, 1.0])
def test_room_is_given_up_past_the_soft_mark_only(tmp_path: Path, soft_mark: float) -> None:
    config = EngineConfig(
        data_dir=tmp_path / "store", capacity_bytes=64 << 20, soft_mark=soft_mark, upkeep_period_s=0.1
    )
    with Store(Engine(config)) as store:
        run = store.run("demo", fields=[fields.token_ids(), Field("wide", "uint8", shape=(ROW_BYTES,))])
        run.mark("one")
        write(run, "a", 4096)
        run.claim(1).release()
        if soft_mark == 1.0:
            write(run, "b", 16)
            assert store.stats()["kept_given_up_total"] == 0
            assert run.rewind("one").segments == ["a~0", "b~0"][:1]
            return
        wait_until(lambda: store.stats()["kept_given_up_total"] == 1)
        write(run, "b", 16)
        with pytest.raises(errors.MarkSpent, match="its room was needed"):
            run.rewind("one")
        rows = run.sql("SELECT status, reason, kept_segments FROM marks").to_pylist()
        assert [(row["status"], row["kept_segments"]) for row in rows] == [("spent", 0)]
