"""A store that is used for long stays as it was: files, bytes, descriptors, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq.testing.scenes import chunks_stored, wait_until

RSS_GROWTH_BYTES_MAX = 48 << 20
EXTENT_BYTES = 4 << 20


@pytest.mark.parametrize("cycles", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_cycles_leave_files_bytes_descriptors_and_memory_level(tmp_path: Path, cycles: int) -> None:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        run = store.run("cycles", fields=[fields.token_ids(), fields.routed_experts(8, 4)])
        experts = np.random.default_rng(0).integers(0, 256, (63, 8, 4), dtype=np.int32)

        def cycle(number: int) -> None:
            session = run.session(f"s-{number}")
            with session.step(sampled=(8, 64)) as step:
                step.put("token_ids", np.arange(64), start=0)
                step.put("routed_experts", experts, start=0)
            session.finalize(reward=1.0)
            batch = run.claim(1)
            np.testing.assert_array_equal(batch.fetch("routed_experts")["routed_experts"][0], experts)
            batch.release()

        for number in range(cycles // 5):
            cycle(number)
        before = _level(store, tmp_path)
        for number in range(cycles // 5, cycles):
            cycle(number)
        wait_until(lambda: chunks_stored(store) == 0)
        after = _level(store, tmp_path)
        assert after["descriptors"] <= before["descriptors"] + 4
        assert after["files"] <= before["files"] + 4
        assert after["used_bytes"] <= before["used_bytes"] + 2 * EXTENT_BYTES
        assert after["rss_bytes"] <= before["rss_bytes"] + RSS_GROWTH_BYTES_MAX
        assert int(run.sql("SELECT count(*) AS n FROM segments").column("n")[0].as_py()) == cycles


def _level(store: Store, folder: Path) -> dict[str, float]:
    return {
        "files": sum(1 for path in (folder / "store" / "memory").rglob("*") if path.is_file()),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "used_bytes": store.stats()["used_bytes"],
        "rss_bytes": psutil.Process().memory_info().rss,
    }
